"""Parameters by the names they have in the undivided model, whatever part of it this rank has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from megatron.core.utils import unwrap_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_PLACE = re.compile(r"^decoder\.layers\.\d+\.|^[^.]+\.(?:final_layernorm\.)?")


def held_parameters(chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of this rank; layers and experts are counted from 0 over all ranks.

    Args:
        chunks: This rank's `GPTModel`s, wrapped or not.
    """
    held: dict[str, nn.Parameter] = {}
    for chunk in chunks:
        model: Any = unwrap_model(chunk)
        for name, parameter in model.named_parameters():
            held[_global_name(name, model)] = parameter
    return held


def place_of(name: str) -> str:
    """Return what the global names of parameters that one pipeline stage has begin with.

    Example: "decoder.layers.3.mlp.router.weight" -> "decoder.layers.3."
    """
    match = _PLACE.match(name)
    assert match is not None, name
    return match.group()


def _global_name(name: str, model: Any) -> str:
    match = _LAYER.match(name)
    if match is None:
        return name
    layer = model.decoder.layers[int(match.group(1))]
    rest = _EXPERT.sub(
        lambda expert: f".local_experts.{layer.mlp.local_expert_indices[int(expert.group(1))]}.",
        name[match.end() :],
    )
    # Megatron-core counts layers from 1.
    return f"decoder.layers.{layer.layer_number - 1}.{rest}"
