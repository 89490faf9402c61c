"""Low-rank adapters on the wire: the names and shapes of the factors of `W + B @ A`.

A sender with adapters sends the base `W` once, and with each version the factors alone:

    model.layers.0.mlp.up_proj.weight         [outputs, inputs]  the base
    model.layers.0.mlp.up_proj.lora_A.weight  [r, inputs]
    model.layers.0.mlp.up_proj.lora_B.weight  [outputs, r]       already multiplied by the scale
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rl_refit.plan import Metadata, TensorSpec, read_specs

DOWN = ".lora_A.weight"
"""The end of the name of A."""
UP = ".lora_B.weight"
"""The end of the name of B."""
_WEIGHT = ".weight"


def check_adapters(base: Sequence[TensorSpec], metadata: Metadata) -> tuple[TensorSpec, ...]:
    """Return the specs of adapters that fit the base.

    Args:
        base: The tensors that they belong to.
        metadata: Of the adapters: A and B of each, in any order.

    Raises:
        ValueError: There are none; a name is not one of an adapter, or its layer is not in the
            base; one of A and B is missing; or a shape is not that of the module's table.
    """
    specs = read_specs(metadata)
    if not specs:
        raise ValueError("adapters has no tensors")
    weights = {spec.name: spec for spec in base}
    found = {spec.name: spec for spec in specs}
    for layer in adapted_layers(found):
        weight = weights.get(layer + _WEIGHT)
        down, up = found.get(layer + DOWN), found.get(layer + UP)
        if weight is None or down is None or up is None:
            missing = _WEIGHT if weight is None else DOWN if down is None else UP
            raise ValueError(f"the adapter of {layer} has no {layer}{missing}")
        rank = down.shape[0]
        if (*up.shape[:1], *down.shape[1:]) != weight.shape or up.shape[1:] != (rank,):
            raise ValueError(f"{down} and {up} are no adapter of {weight}")
    return specs


def is_adapter(name: str) -> bool:
    """Return whether a tensor's name is that of a factor of an adapter."""
    return name.endswith((DOWN, UP))


def adapted_layers(names: Iterable[str]) -> list[str]:
    """Return the layers of adapters, by the names of their factors, each once.

    Raises:
        ValueError: A name is not one of an adapter.
    """
    layers: dict[str, None] = {}
    for name in names:
        ends = [end for end in (DOWN, UP) if name.endswith(end)]
        if not ends:
            raise ValueError(
                f"{name} is not the name of an adapter: it has to end with {DOWN} or {UP}"
            )
        layers[name.removesuffix(ends[0])] = None
    return list(layers)
