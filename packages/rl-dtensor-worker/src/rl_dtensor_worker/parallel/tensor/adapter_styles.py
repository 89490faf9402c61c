"""What the parts of a linear layer with adapters do, where ranks share the layer.

The layer keeps its style, which leads into it and out of it; its parts follow. `B @ A` is shared as
the layer is. Where each rank has some outputs, it has those rows of B, and A is whole. Where each
has some inputs, it has those columns of A, and B is whole: the ranks' products then take part in
the one sum that leads out of the layer. Either way a rank has a part of the gradient of the factor
that is whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from rl_dtensor_worker.parallel.tensor import collectives
from rl_dtensor_worker.parallel.tensor.styles import (
    Column,
    Replicated,
    ReplicatedOnShards,
    Row,
    Style,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class OwnOutputs(Style):
    """A matrix of which each rank has some outputs, within a layer that has been entered."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return outputs apart."""
        return {"weight": Shard(0), "bias": Shard(0)}


class OwnInputs(Style):
    """A matrix of which each rank has some inputs, within a layer whose results are summed."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return inputs apart; the bias is whole."""
        return {"weight": Shard(1)}

    def run(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Let the first rank alone add the bias, which is not trained."""
        bias = module._parameters.get("bias")
        if bias is not None and self.ranks.rank > 0:
            assert not bias.requires_grad
            module._parameters["bias"] = None
        return forward(*args, **kwargs)


class DropoutOfOwnInputs(Style):
    """Dropout before a matrix of which each rank has some inputs: as if there was one rank."""

    def run(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Draw for all inputs, as every rank does, and take this rank's part."""
        (values,) = args
        width = values.shape[-1] * self.ranks.size
        factors = forward(values.new_ones((*values.shape[:-1], width)))
        return values * collectives.part_of(factors, self.ranks.group, -1)


_DROPOUT = "lora_dropout.default"
_PARTS: dict[type[Style], dict[str, type[Style]]] = {
    Column: {
        "base_layer": OwnOutputs,
        "lora_A.default": ReplicatedOnShards,
        "lora_B.default": OwnOutputs,
    },
    Row: {
        "base_layer": OwnInputs,
        _DROPOUT: DropoutOfOwnInputs,
        "lora_A.default": OwnInputs,
        "lora_B.default": ReplicatedOnShards,
    },
    **{
        whole: dict.fromkeys(("base_layer", "lora_A.default", "lora_B.default"), whole)
        for whole in (Replicated, ReplicatedOnShards)
    },
}
"""By the style of the layer, or the one that it is a kind of."""


def part_styles(
    model: nn.Module,
    layers: Iterable[str],
    style_of: Callable[[str], type[Style] | ParallelStyle | None],
) -> dict[str, type[Style]]:
    """Return the style of each part of the layers with adapters, by its name in `model`.

    Args:
        model: The model.
        layers: The names of those layers.
        style_of: The style of a layer; None where it has no place in the plan.

    Raises:
        ValueError: Adapters cannot follow a style.
    """
    styles: dict[str, type[Style]] = {}
    for name in layers:
        style = style_of(name)
        if style is None:
            continue
        for part, part_style in _parts_of(style, name).items():
            inner = f"{name}.{part}"
            # Peft puts an identity there where nothing is dropped.
            if part != _DROPOUT or isinstance(model.get_submodule(inner), nn.Dropout):
                styles[inner] = part_style
    return styles


def _parts_of(style: type[Style] | ParallelStyle, name: str) -> Mapping[str, type[Style]]:
    if isinstance(style, type):
        for kind, parts in _PARTS.items():
            if issubclass(style, kind):
                return parts
    said = style.__name__ if isinstance(style, type) else type(style).__name__
    raise ValueError(
        f"policy.dtensor_cfg.custom_parallel_plan has the style {said} for {name}, which adapters "
        "cannot follow: name it colwise or rowwise, or leave it out of "
        "policy.dtensor_cfg.lora.target_modules"
    )
