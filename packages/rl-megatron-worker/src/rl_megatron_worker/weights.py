"""The model's weights on their way out: full, in the wire dtype, a layer at a time.

`MegatronWeights` is the source that receivers see; below it, the gathers of a layer: shards are
all-gathered on the stage that has the layer, and broadcast from there to the other stages.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from rl_interfaces.backend.runtime import all_gather_single
from rl_interfaces.backend.transfer import (
    LayeredSource,
    check_names,
    overlap_gathers,
)
from rl_refit.plan import block_of
from rl_refit.resharding import Box, Shard
from rl_refit.source import WeightMeta

from rl_megatron_worker.model.load import held_parameters, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from collections.abc import Mapping as Map
    from contextlib import AbstractContextManager

    from torch import nn

    from rl_megatron_worker.convert import Mapping

_GROUPS = ["tp", "pp", "ep", "expt_tp", "tp_ep"]
Tensors = dict[str, torch.Tensor]
Shape = tuple[int, ...]


class MegatronWeights(LayeredSource):
    """The model's full tensors under Hugging Face names.

    A layer's shards are cast to the wire dtype, all-gathered on the layer's pipeline stage, and
    broadcast to the other stages.

    Args:
        chunks: This rank's `GPTModel`s; their parameters are read when they are iterated over.
        mappings: The mappings of all ranks' parameters, in the order of export.
        wire_dtype: The dtype of every tensor on the wire.
        device: The device of the gathered tensors.
        scope: Entered while tensors are gathered.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mappings: Sequence[Mapping],
        *,
        wire_dtype: torch.dtype,
        device: torch.device,
        scope: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._chunks = chunks
        self._wire_dtype = wire_dtype
        self._device = device
        self._scope = scope
        self._groups = ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
        # A tied output layer is exported once, under the embedding's name.
        self._exported = [mapping for mapping in mappings if not mapping.is_copy]
        # Several parameters have one tensor where it stacks experts.
        self._mappings_of: dict[str, list[Mapping]] = {}
        for each in self._exported:
            for name in each.sources:
                self._mappings_of.setdefault(name, []).append(each)
        experts = [each.expert for each in self._exported if each.expert is not None]
        self._num_experts = max(experts) + 1 if experts else 0

    def metadata(self) -> list[WeightMeta]:
        """See `LayeredSource.metadata`."""
        return [
            WeightMeta(name, self._wire_dtype, mappings[0].sources[name])
            for name, mappings in self._mappings_of.items()
        ]

    @torch.no_grad()
    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See `LayeredSource.gather`."""
        names = check_names(names, self._mappings_of)
        with self._scope():
            held = self._held()
            layers = groupby(names, key=self._layer_and_stage)
            yield from overlap_gathers(
                self._start(list(layer), stage, held) for (_, stage), layer in layers
            )

    def shards(self) -> dict[str, list[Shard]]:
        """Return what this rank holds of each tensor, see `GatheredSource.shards`."""
        found: dict[str, list[Shard]] = {}
        held = self._held()
        for mapping in self._exported:
            if mapping.names[0] in held:
                parameter = held[mapping.names[0]].detach()
                group = self._groups.tp if mapping.expert is None else self._groups.expt_tp
                slices = mapping.slices(parameter, rank=group.rank(), size=group.size())
                for source, offset, data in slices:
                    box = Box(offset, tuple(data.shape))
                    shard = Shard(mapping.sources[source], box, data)
                    found.setdefault(source, []).append(shard)
        return found

    def _start(self, names: list[str], stage: int, held: dict[str, torch.Tensor]) -> _LayerGather:
        """Start to gather tensors of one pipeline stage."""
        groups = self._groups
        layer = _LayerGather(
            {name: self._mappings_of[name][0].sources[name] for name in names},
            dtype=self._wire_dtype,
            device=self._device,
            stage=stage,
            pipeline=groups.pp,
        )
        # Other stages only receive: they hold no shard, and their buffer is filled in `finish`.
        if groups.pp.rank() != stage:
            return layer
        # A fused parameter has several names (QKV, gate and up): gather it once.
        every = [each for name in names for each in self._mappings_of[name]]
        mappings = {each.names[0]: each for each in every}
        dense = [each for each in mappings.values() if each.expert is None]
        experts = [each for each in mappings.values() if each.expert is not None]
        # Norms and routers are replicated over tensor-parallel ranks: no collective.
        for each in dense:
            if each.dim is None:
                layer.copy_replicated(each, held[each.names[0]])
        if sharded := [each for each in dense if each.dim is not None]:
            layer.start_gather([sharded], held, group=groups.tp)
        # Experts are sharded twice, over expert- and expert-tensor-parallel ranks: one all-gather
        # over both, in which every rank contributes the experts that it holds.
        if experts:
            layer.start_gather(self._by_expert_rank(experts), held, group=groups.tp_ep)
        return layer

    def _by_expert_rank(self, experts: list[Mapping]) -> list[list[Mapping]]:
        """Return the experts' mappings by the expert-parallel rank that holds them."""
        ranks, shards = self._groups.ep.size(), self._groups.expt_tp.size()
        position = self._groups.ep.rank() * shards + self._groups.expt_tp.rank()
        assert self._groups.tp_ep.rank() == position, "expert-tensor-parallel ranks are adjacent"
        num_experts = self._num_experts // ranks
        by_rank: list[list[Mapping]] = [[] for _ in range(ranks)]
        for each in experts:
            assert each.expert is not None
            by_rank[each.expert // num_experts].append(each)
        return by_rank

    def _held(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters by the first names of their mappings."""
        held = held_parameters(self._chunks)
        return {
            mapping.names[0]: held[name]
            for mapping in self._exported
            for name in mapping.names
            if name in held
        }

    def _layer_and_stage(self, name: str) -> tuple[str, int]:
        return block_of(name), self._stage_of[self._place(name)]

    def _place(self, name: str) -> str:
        """Return the place of a tensor, see `place_of`: all of its parameters are there."""
        return place_of(self._mappings_of[name][0].names[0])

    @cached_property
    def _stage_of(self) -> dict[str, int]:
        """The pipeline stage of each name prefix, see `place_of`. Collective on first access."""
        pipeline = self._groups.pp
        mine = {place_of(name) for name in self._held()}
        places = sorted({self._place(name) for name in self._mappings_of})
        stages = torch.tensor(
            [pipeline.rank() if place in mine else -1 for place in places], device=self._device
        )
        # Each place is on one stage; the others contribute -1.
        dist.all_reduce(stages, op=dist.ReduceOp.MAX, group=pipeline)
        stage_of = dict(zip(places, stages.tolist(), strict=True))
        assert all(stage >= 0 for stage in stage_of.values()), stage_of
        return stage_of


class _LayerGather:
    """The full tensors of a layer: gathered on its pipeline stage, broadcast to the others.

    Args:
        shapes: Full shapes, by name.
        dtype: The wire dtype.
        device: The device of the gathered tensors.
        stage: The pipeline stage of the layer.
        pipeline: The pipeline-parallel group.
    """

    def __init__(
        self,
        shapes: Map[str, Shape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        stage: int,
        pipeline: dist.ProcessGroup,
    ) -> None:
        sizes = [math.prod(shape) for shape in shapes.values()]
        # One flat buffer, so that the broadcast to the other stages is one collective.
        self._flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        parts = self._flat.split(sizes)
        self._tensors = {
            name: part.view(shape)
            for part, (name, shape) in zip(parts, shapes.items(), strict=True)
        }
        self._stage = stage
        self._pipeline = pipeline
        self._gathers: list[_Gather] = []

    def copy_replicated(self, mapping: Mapping, parameter: torch.Tensor) -> None:
        """Copy a parameter that this rank holds unsharded."""
        mapping.unshard(parameter, self._tensors, rank=0, size=1)

    def start_gather(
        self, mappings: Sequence[Sequence[Mapping]], held: Tensors, *, group: dist.ProcessGroup
    ) -> None:
        """Start an asynchronous all-gather of sharded parameters. Collective.

        Args:
            mappings: One list per set of consecutive ranks in the group: rank `i * shards + j`
                holds shard `j` of each of `mappings[i]`.
            held: This rank's shards, by the first names of their mappings.
            group: The ranks that hold the shards.
        """
        if group.size() == 1:
            for mapping in mappings[0]:
                self.copy_replicated(mapping, held[mapping.names[0]])
            return
        gather = _Gather.start(
            mappings, held, group=group, dtype=self._flat.dtype, device=self._flat.device
        )
        self._gathers.append(gather)

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the gathers, broadcast, and yield name and full tensor. Collective."""
        for gather in self._gathers:
            gather.unshard(self._tensors)
        self._gathers.clear()
        if self._pipeline.size() > 1:
            source = dist.get_global_rank(self._pipeline, self._stage)
            dist.broadcast(self._flat, src=source, group=self._pipeline)
        yield from self._tensors.items()


@dataclass(frozen=True, kw_only=True, slots=True)
class _ShardSlot:
    """The range of a parameter's shard in a rank's flat contribution to a gather."""

    mapping: Mapping
    start: int
    end: int
    shape: Shape


def _assign_slots(mappings: Sequence[Mapping], shapes: Sequence[Shape]) -> list[_ShardSlot]:
    ends = list(accumulate(math.prod(shape) for shape in shapes))
    return [
        _ShardSlot(mapping=mapping, start=start, end=end, shape=shape)
        for mapping, shape, start, end in zip(mappings, shapes, [0, *ends], ends, strict=False)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gather:
    """A pending all-gather of the shards of several parameters."""

    parts: list[list[_ShardSlot]]
    """The slots of each set of ranks."""
    num_shards: int
    """Number of ranks in each set."""
    gathered: torch.Tensor
    """`[sets, ranks per set, elements]`."""
    work: dist.Work = field(repr=False)

    @classmethod
    def start(
        cls,
        mappings: Sequence[Sequence[Mapping]],
        held: Tensors,
        *,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _Gather:
        num_shards, rest = divmod(group.size(), len(mappings))
        assert rest == 0, (group.size(), len(mappings))
        parts = [
            _assign_slots(each, [_shard_shape(mapping, held, num_shards) for mapping in each])
            for each in mappings
        ]
        # An all-gather needs equal sizes: sets with fewer parameters leave the rest uninitialised.
        num_elements = max(each[-1].end if each else 0 for each in parts)
        own = torch.empty(num_elements, dtype=dtype, device=device)
        for part in parts[group.rank() // num_shards]:
            # The cast to the wire dtype, before the bytes are sent.
            own[part.start : part.end].view(part.shape).copy_(held[part.mapping.names[0]])
        gathered = own.new_empty(len(mappings), num_shards, num_elements)
        work = all_gather_single(gathered.view(-1), own, group=group, async_op=True)
        assert work is not None
        return cls(parts=parts, num_shards=num_shards, gathered=gathered, work=work)

    def unshard(self, into: Tensors) -> None:
        """Wait for the collective, and copy the shards into the full tensors."""
        self.work.wait()
        for parts, shards in zip(self.parts, self.gathered, strict=True):
            for part in parts:
                for rank, elements in enumerate(shards):
                    shard = elements[part.start : part.end].view(part.shape)
                    part.mapping.unshard(shard, into, rank=rank, size=self.num_shards)


def _shard_shape(mapping: Mapping, held: Tensors, size: int) -> Shape:
    """Return the shape of each rank's shard, padded as on this rank."""
    own = held.get(mapping.names[0])
    return mapping.shard_shape(size) if own is None else tuple(own.shape)
