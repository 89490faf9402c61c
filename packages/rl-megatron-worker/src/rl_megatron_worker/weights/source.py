"""The model's weights on their way out: whole, in the wire dtype, a layer at a time."""

from __future__ import annotations

from functools import cached_property
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from rl_refit.source import block_of

from rl_megatron_worker.weights.gather import Layer
from rl_megatron_worker.weights.names import held_parameters, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from rl_megatron_worker.convert import Mapping

_GROUPS = ["tp", "pp", "ep", "expt_tp", "tp_ep"]


class WeightMeta(NamedTuple):
    """What is known of a tensor before it is gathered."""

    name: str
    dtype: torch.dtype
    """On the wire."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


class MegatronWeights:
    """The model's tensors under Hugging Face names: a `rl_interfaces.WeightSource`.

    The trainer's side of vLLM's own weight-transfer engines takes it as well. A layer's shards are
    cast to the wire dtype, gathered on the stage that has the layer, and sent from there to the
    other stages; while a layer is handed out, the next one is being gathered.

    Args:
        chunks: This rank's `GPTModel`s; their parameters are read when they are iterated over.
        mappings: How each parameter is made, of all ranks, in the order of export.
        wire_dtype: The dtype of every tensor on the wire.
        device: Where the whole tensors are gathered.
        groups: Megatron-core's groups of ranks; by default those it was set up with.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mappings: Sequence[Mapping],
        *,
        wire_dtype: torch.dtype,
        device: torch.device,
        groups: ProcessGroupCollection | None = None,
    ) -> None:
        self._chunks = chunks
        self._wire_dtype = wire_dtype
        self._device = device
        self._groups = groups or ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
        exported = [mapping for mapping in mappings if not mapping.is_copy]
        self._mapping_of = {name: each for each in exported for name in each.sources}
        experts = [each.expert for each in exported if each.expert is not None]
        self._num_experts = max(experts) + 1 if experts else 0

    def metadata(self) -> list[WeightMeta]:
        """Return name, wire dtype and full shape of every tensor, without moving any."""
        return [
            WeightMeta(name, self._wire_dtype, mapping.sources[name])
            for name, mapping in self._mapping_of.items()
        ]

    def held_names(self) -> None:
        """Return None: every rank has all tensors once they are gathered."""

    def groups(self) -> list[list[str]]:
        """Return the names of what is gathered at a time, in the order of `metadata`."""
        return [list(group) for _, group in groupby(self._mapping_of, key=block_of)]

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Yield names and whole tensors of each of `groups`. Every rank takes part."""
        tensors = iter(self)
        for group in self.groups():
            yield group, [tensor for _, tensor in islice(tensors, len(group))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole tensor in the order of `metadata`. Every rank takes part."""
        return self.gather(self._mapping_of)

    @torch.no_grad()
    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole tensor of each of `names`. Every rank takes part.

        Raises:
            ValueError: There is no tensor of that name.
        """
        names = list(names)
        if unknown := [name for name in names if name not in self._mapping_of]:
            raise ValueError(f"there is no tensor {unknown[0]!r} in the model")
        held = self._held()
        # Two layers in flight: the one that is handed out, and the one that is gathered.
        pending: Layer | None = None
        for (_, stage), group in groupby(names, key=self._layer_and_stage):
            following = self._start(list(group), stage, held)
            if pending is not None:
                yield from pending.finish()
            pending = following
        if pending is not None:
            yield from pending.finish()

    def _start(self, names: list[str], stage: int, held: dict[str, torch.Tensor]) -> Layer:
        """Start to gather tensors of one stage."""
        groups = self._groups
        layer = Layer(
            {name: self._mapping_of[name].sources[name] for name in names},
            dtype=self._wire_dtype,
            device=self._device,
            stage=stage,
            pipeline=groups.pp,
        )
        if groups.pp.rank() != stage:
            return layer
        # Several names may be of one parameter.
        mappings = {self._mapping_of[name].names[0]: self._mapping_of[name] for name in names}
        dense = [each for each in mappings.values() if each.expert is None]
        experts = [each for each in mappings.values() if each.expert is not None]
        for each in dense:
            if each.dim is None:
                layer.take(each, held[each.names[0]])
        if cut := [each for each in dense if each.dim is not None]:
            layer.start_gather([cut], held, group=groups.tp)
        if experts:
            layer.start_gather(self._deal_out(experts), held, group=groups.tp_ep)
        return layer

    def _deal_out(self, experts: list[Mapping]) -> list[list[Mapping]]:
        """Return the experts' parameters by the expert-parallel rank that has them."""
        ranks, shards = self._groups.ep.size(), self._groups.expt_tp.size()
        position = self._groups.ep.rank() * shards + self._groups.expt_tp.rank()
        assert self._groups.tp_ep.rank() == position, "expert-tensor-parallel ranks are neighbours"
        num_experts = self._num_experts // ranks
        dealt: list[list[Mapping]] = [[] for _ in range(ranks)]
        for each in experts:
            assert each.expert is not None
            dealt[each.expert // num_experts].append(each)
        return dealt

    def _held(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters under the first names of their mappings."""
        held = held_parameters(self._chunks)
        return {
            mapping.names[0]: held[name]
            for mapping in self._mapping_of.values()
            for name in mapping.names
            if name in held
        }

    def _layer_and_stage(self, name: str) -> tuple[str, int]:
        return block_of(name), self._stage_of[place_of(self._mapping_of[name].names[0])]

    @cached_property
    def _stage_of(self) -> dict[str, int]:
        """Which pipeline stage has the parameters of each place. Collective the first time."""
        pipeline = self._groups.pp
        mine = {place_of(name) for name in self._held()}
        places = sorted({place_of(mapping.names[0]) for mapping in self._mapping_of.values()})
        stages = torch.tensor(
            [pipeline.rank() if place in mine else -1 for place in places], device=self._device
        )
        dist.all_reduce(stages, op=dist.ReduceOp.MAX, group=pipeline)
        stage_of = dict(zip(places, stages.tolist(), strict=True))
        assert all(stage >= 0 for stage in stage_of.values()), stage_of
        return stage_of
