"""The model's full weights in the wire dtype, all-gathered a layer at a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from rl_refit.source import block_of

from rl_dtensor_worker.model.build import persistent_state
from rl_dtensor_worker.model.lora import (
    AdaptedWeight,
    adapted_weights,
    adapters_of,
    without_adapters,
)
from rl_dtensor_worker.weights.gather import BucketGather

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch.distributed as dist
    from transformers import PreTrainedModel


class WeightMeta(NamedTuple):
    """What the receiver needs to know about a tensor in advance."""

    name: str
    dtype: torch.dtype
    """On the wire."""
    shape: tuple[int, ...]
    """Of the full tensor."""


class ModelWeights:
    """The full tensors of a sharded model, iterable repeatedly: a `rl_interfaces.WeightSource`.

    vLLM's own weight-transfer engines accept it as well.

    Tied tensors come once, under their first name. Each tensor is cast to the wire dtype before the
    all-gather, so that no more bytes than needed cross the network, and the next layer is gathered
    while the current one is consumed. Adapters are merged into the weights that are sent; the
    model's own tensors do not change.

    Args:
        model: The model; its parameters are read during iteration, not before.
        wire_dtype: The dtype of floating-point tensors on the wire; others keep theirs.
        group: The ranks that hold the shards of one copy. None: nothing is sharded.
        device: Where the full tensors are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        wire_dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._wire_dtype = wire_dtype
        self._group = group
        self._device = device

    def metadata(self) -> list[WeightMeta]:
        """Return name, wire dtype and full shape of every tensor, without moving any."""
        return [
            WeightMeta(name, self._dtype_of(tensor), tuple(tensor.shape))
            for name, tensor in without_adapters(persistent_state(self._model)).items()
        ]

    def held_names(self) -> None:
        """Return None: every rank has all tensors after the gather."""

    def groups(self) -> list[list[str]]:
        """Return the names that are gathered together, in the order of `metadata`."""
        names = (name for name, _, _ in self.metadata())
        return [list(group) for _, group in groupby(names, key=block_of)]

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Yield names and full tensors of each of `groups`. Collective."""
        tensors = iter(self)
        for group in self.groups():
            yield group, [tensor for _, tensor in islice(tensors, len(group))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full tensor in the order of `metadata`. Collective."""
        return self.gather(name for name, _, _ in self.metadata())

    @torch.no_grad()
    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full tensor of each of `names`. Collective.

        Raises:
            ValueError: The model has no tensor of that name.
        """
        state = persistent_state(self._model)
        weights, adapters = without_adapters(state), adapters_of(state)
        adapted = adapted_weights(self._model)
        names = list(names)
        if unknown := [name for name in names if name not in weights]:
            raise ValueError(f"there is no tensor {unknown[0]!r} in the model")
        # Two layers in flight: one is consumed while the next is gathered.
        pending: _Layer | None = None
        for _, group in groupby(names, key=block_of):
            chosen = {name: weights[name] for name in group}
            merges = {name: adapted[name] for name in chosen if name in adapted}
            factors = [name for merge in merges.values() for name in (merge.down, merge.up)]
            following = _Layer(
                weights=self._start(chosen),
                factors=self._start({name: adapters[name] for name in factors}, torch.float32),
                merges=merges,
            )
            if pending is not None:
                yield from pending.finish()
            pending = following
        if pending is not None:
            yield from pending.finish()

    def _start(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
    ) -> BucketGather:
        return BucketGather.start(
            list(tensors.items()),
            [dtype or self._dtype_of(tensor) for tensor in tensors.values()],
            group=self._group,
            device=self._device,
        )

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self._wire_dtype if tensor.is_floating_point() else tensor.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """The gathers of one layer's weights, and of the adapters that are merged into them."""

    weights: BucketGather
    factors: BucketGather
    merges: Mapping[str, AdaptedWeight]

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for them; yield name and full tensor."""
        factors = dict(self.factors.finish())
        for name, weight in self.weights.finish():
            merge = self.merges.get(name)
            yield name, weight if merge is None else merge.merge(weight, factors)
