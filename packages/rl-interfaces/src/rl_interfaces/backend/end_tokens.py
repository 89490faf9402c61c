"""The tokens that end a completion, and those that are never sampled: one answer for all samplers.

A model declares its end tokens in up to three places: generation_config.json, config.json and its
tokenizer. `transformers.generate` stops at any of the first, vLLM's server at any of the first and
the last, and models of one family differ in which of them is complete.
"""

# transformers annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from rl_interfaces.backend.checkpoint.hf_files import model_file

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

_KEY = "eos_token_id"


def end_token_ids(
    model_name: str | None, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> tuple[int, ...]:
    """Return the ids at any of which a completion of a model ends, ascending.

    Args:
        model_name: The model's directory or name. None, or a model that transformers does not
            know: its tokenizer's end token is the only one.
        tokenizer: The model's tokenizer.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        ValueError: The model's generation_config.json is not a JSON object.
    """
    found = set(_ids(tokenizer.eos_token_id))
    if model_name is not None:
        found |= set(_declared(model_name, trust_remote_code=trust_remote_code))
    return tuple(sorted(found))


def _declared(model_name: str, *, trust_remote_code: bool) -> Iterator[int]:
    try:
        written, _ = PreTrainedConfig.get_config_dict(model_name)
        config = AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        # The model of another backend need not be one of transformers.
        return
    path = model_file(model_name, GENERATION_CONFIG_NAME)
    if path is None:
        # transformers makes one of the config, with the defaults of its class.
        for each in (config, config.get_text_config()):
            yield from _ids(getattr(each, _KEY, None))
    else:
        yield from _ids(_read_object(path, model_name).get(_KEY))
    # What a file says: the default of a class may be an ordinary token of this model.
    for section in (written, *written.values()):
        if isinstance(section, Mapping):
            yield from _ids(cast("Mapping[str, object]", section).get(_KEY))


def _read_object(path: Path, model_name: str) -> Mapping[str, object]:
    """Return the JSON object in a file of a model."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"policy.model_name={model_name!r}: {path.name}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"policy.model_name={model_name!r}: {path.name} is not a JSON object")
    return cast("Mapping[str, object]", content)


def _ids(value: object) -> Iterator[int]:
    """Yield the ids of an int, a list, or None; negative ones stand for none."""
    for each in cast("list[object]", value) if isinstance(value, list | tuple) else [value]:
        if isinstance(each, int) and each >= 0:
            yield each


def num_token_ids(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return how many ids a tokenizer has; None if it has no vocabulary.

    A model may have more rows, to be a round number. They have no text, and are never sampled.
    """
    get_vocab: Any = getattr(tokenizer, "get_vocab", None)
    if get_vocab is None:
        return None
    # Added tokens may leave a gap after the others.
    return 1 + max(get_vocab().values())
