"""Checks of Hugging Face config settings against what Megatron-core's `GPTModel` computes."""

from __future__ import annotations

from typing import Any

# Constants of Llama 3's RoPE scaling that `GPTModel` hard-codes.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def require(hf_config: Any, name: str, *allowed: Any) -> None:
    """Raise if `GPTModel` would compute a setting differently.

    Args:
        hf_config: The model's config. A missing setting passes.
        name: Name of the setting.
        allowed: The supported values.

    Raises:
        ValueError: The setting has another value.
    """
    value = getattr(hf_config, name, allowed[0])
    if value not in allowed:
        raise refusal(hf_config, f"{name}={value!r}", f"{name}={allowed[0]!r}")


def refusal(hf_config: Any, setting: str, supported: str) -> ValueError:
    """Return the error that names a setting, and the supported value."""
    return ValueError(
        f"policy.model_name={hf_config.name_or_path!r}: its config ({hf_config.model_type}) has "
        f"{setting}, which Megatron-core's GPTModel does not compute; supported: {supported}"
    )


def require_full_attention(hf_config: Any) -> None:
    """Raise if a layer has sliding-window attention."""
    kinds = getattr(hf_config, "layer_types", None)
    window = getattr(hf_config, "sliding_window", None)
    if kinds is None and window is not None:
        raise refusal(hf_config, f"sliding_window={window}", "sliding_window=None")
    if others := sorted({kind for kind in kinds or () if kind != "full_attention"}):
        raise refusal(
            hf_config,
            f"{others[0]!r} (sliding_window={window}) among its layer_types",
            "full_attention in every layer",
        )


def head_size(hf_config: Any) -> int:
    """Return the size of an attention head."""
    given = getattr(hf_config, "head_dim", None)
    return given or hf_config.hidden_size // hf_config.num_attention_heads


def rotary(hf_config: Any) -> tuple[float, dict[str, Any]]:
    """Return the RoPE base, and `GPTModel`'s arguments for scaled frequencies.

    Raises:
        ValueError: `GPTModel` does not support the kind of scaling.
    """
    parameters: dict[str, Any] = hf_config.rope_parameters
    theta, kind = parameters["rope_theta"], parameters.get("rope_type", "default")
    partial = parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise refusal(hf_config, f"partial_rotary_factor={partial}", "1.0")
    if kind == "default":
        return theta, {}
    if kind == "linear":
        return theta, {"seq_len_interpolation_factor": parameters["factor"]}
    if kind != "llama3":
        raise refusal(hf_config, f"rope_type={kind!r}", "'default', 'linear' and 'llama3'")
    for name, value in _LLAMA3.items():
        if parameters[name] != value:
            raise refusal(
                hf_config, f"rope_type='llama3' with {name}={parameters[name]}", str(value)
            )
    return theta, {"rope_scaling": True, "rope_scaling_factor": parameters["factor"]}
