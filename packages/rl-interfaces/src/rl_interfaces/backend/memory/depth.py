"""From traces of two shallow models to the peaks of a deep one.

All layers of most models are alike. While layer `k` of `L` runs, forward or backward, the bytes
that are allocated are then linear in `k` and in `L`: each layer before it has saved the same
activations, each layer after it has left the same gradients, and each of all layers has the same
parameters. So the peak over all places is that of a layer at the beginning or at the end, and the
peak of such a place, counted from its end of the model, is linear in `L`. Two depths give the line.
The peak of a whole call is no such line, since another place may have it in a deeper model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# At each end, two layers that have others beside them, and in the deeper model two more between.
_SHALLOW, _DEEP = 4, 6
# Below this a full trace takes as long as two.
_LEAST_LAYERS = 12
# What is left of a shallow model must be sharded as the full one is: far above the sizes at which a
# backend treats a model as a small one.
_LEAST_PARAMETERS = 2**25


@dataclass(frozen=True, kw_only=True, slots=True)
class Depths:
    """The numbers of layers to trace.

    Attributes:
        traced: Of each trace; one, which is the model's own, or two smaller ones.
        num_layers: Of the model.
        reason: Why all layers are traced; empty if they are not.
    """

    traced: tuple[int, ...]
    num_layers: int
    reason: str = ""


def plan_depths(
    config: PreTrainedConfig,
    layers: Sequence[nn.Module],
    *,
    num_other_parameters: int,
    tensor_parallel: int,
    all_layers: bool = False,
) -> Depths:
    """Return the depths to trace.

    Args:
        config: Of the model.
        layers: Its repeated layers, in order.
        num_other_parameters: Parameters outside of the layers.
        tensor_parallel: The ranks that shard each layer.
        all_layers: Whether to trace all layers in any case.
    """
    count = len(layers)
    reason = _reason_for_all(config, layers)
    if all_layers:
        reason = "all layers are asked for"
    elif not reason:
        left = num_other_parameters + _SHALLOW * _num_parameters(layers[0])
        if left // tensor_parallel < _LEAST_PARAMETERS:
            reason = "the model is small"
    if reason:
        return Depths(traced=(count,), num_layers=count, reason=reason)
    return Depths(traced=(_SHALLOW, _DEEP), num_layers=count)


def _reason_for_all(config: PreTrainedConfig, layers: Sequence[nn.Module]) -> str:
    text = config.get_text_config()
    if len(layers) < _LEAST_LAYERS:
        return "the model has few layers"
    if len(layers) != getattr(text, "num_hidden_layers", None):
        return "num_hidden_layers is not the number of its layers"
    kinds = {str(each) for each in getattr(text, "layer_types", None) or ()}
    shapes = {
        tuple((name, tuple(each.shape)) for name, each in layer.named_parameters())
        for layer in layers
    }
    if len(kinds) > 1 or len(shapes) > 1:
        return "its layers are not alike"
    return ""


def _num_parameters(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def extrapolate(values: Mapping[int, float], num_layers: int) -> float:
    """Return what a line through two depths gives for another one.

    Example:
        extrapolate({4: 10.0, 6: 14.0}, 80) -> 162.0

    Args:
        values: By depth; with one depth its value is returned.
        num_layers: The other depth.
    """
    if len(values) == 1:
        return next(iter(values.values()))
    (low, at_low), (high, at_high) = sorted(values.items())
    return at_low + (at_high - at_low) / (high - low) * (num_layers - low)
