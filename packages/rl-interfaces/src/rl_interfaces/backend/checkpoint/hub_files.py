"""The files of a Hugging Face model."""

from __future__ import annotations

from typing import Any

from transformers.modeling_utils import _get_resolved_checkpoint_files


def find_checkpoint(model_name: str, model_config: Any) -> list[str]:
    """Return the files of a model's weights, which transformers looks for and fetches.

    Raises:
        ValueError: There are none.
    """
    try:
        paths, _ = _get_resolved_checkpoint_files(
            pretrained_model_name_or_path=model_name,
            variant=None,
            gguf_file=None,
            use_safetensors=None,
            user_agent=None,
            is_remote_code=False,
            transformers_explicit_filename=getattr(model_config, "transformers_weights", None),
        )
    except OSError as error:
        raise ValueError(f"policy.model_name={model_name!r} has no weights: {error}") from error
    assert paths
    return paths
