"""Rotary frequencies that depend on the sequence length, fixed for one length.

transformers chooses them by the longest row of each forward, so that a row's scores would depend on
its neighbours, on padding and on how sequences are sharded. An inference engine chooses once, by
its longest sequence, and so does this worker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_BY_LENGTH = ("longrope", "dynamic")
_FIXED = "fixed"


def fix_rotary_length(model: PreTrainedModel, max_total_sequence_length: int | None) -> None:
    """Give each rotary embedding the frequencies of the longest sequence, in place, and say so.

    Args:
        model: The model, with its buffers.
        max_total_sequence_length: None: the model's own `max_position_embeddings`. Models without
            positions have none, and no frequencies.
    """
    text = model.config.get_text_config()
    length = max_total_sequence_length or getattr(text, "max_position_embeddings", None)
    if length is None:
        return
    fixed = sorted({kind for module in model.modules() for kind in _fix(module, length)})
    if fixed and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "%s has the rope_type %s, whose frequencies depend on the sequence length: all "
            "sequences get those of %d tokens (policy.max_total_sequence_length, or the model's "
            "max_position_embeddings), as in an inference engine with that max_model_len",
            type(model).__name__,
            fixed,
            length,
        )


def longest_sequence(model: PreTrainedModel) -> int | None:
    """Return how many positions a model has; None for any number.

    Frequencies of the type `dynamic` are made for `factor` times those of its training.
    """
    text = model.config.get_text_config()
    length: int | None = getattr(text, "max_position_embeddings", None)
    rope: Any = getattr(text, "rope_parameters", None) or {}
    if length is None or rope.get("rope_type") != "dynamic":
        return length
    return int(length * rope["factor"])


def _fix(module: nn.Module, length: int) -> list[str]:
    """Fix the frequencies of one module; return the types that it had."""
    # A type, or one for each type of layer.
    given: Any = getattr(module, "rope_type", None)
    by_layer: dict[str | None, Any] = dict(given) if isinstance(given, dict) else {None: given}
    fixed: list[str] = []
    for layer_type, kind in by_layer.items():
        if kind not in _BY_LENGTH:
            continue
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        before = module.get_buffer(name)
        options = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
            module.config, before.device, seq_len=length, **options
        )
        before.copy_(frequencies)
        # transformers updates the frequencies of the types that it knows.
        by_layer[layer_type] = _FIXED
        fixed.append(kind)
    if fixed:
        module.rope_type = by_layer if isinstance(given, dict) else _FIXED  # type: ignore[assignment]
    return fixed
