"""Whole tensors of a layer, made of the shards of all ranks that have parts of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Mapping as Map

    from rl_megatron_worker.convert import Mapping

Tensors = dict[str, torch.Tensor]
Shape = tuple[int, ...]

# Its name since torch 2.13, which warns of the other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Layer:
    """The whole tensors of a layer, which its stage gathers and sends to the other stages.

    Args:
        shapes: Of the whole tensors, by name.
        dtype: Of the tensors that are handed out.
        device: Where they are gathered.
        stage: The pipeline stage that has the layer.
        pipeline: The group of the stages.
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
        self._flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        parts = self._flat.split(sizes)
        self._tensors = {
            name: part.view(shape)
            for part, (name, shape) in zip(parts, shapes.items(), strict=True)
        }
        self._stage = stage
        self._pipeline = pipeline
        self._gathers: list[_Gather] = []

    def take(self, mapping: Mapping, parameter: torch.Tensor) -> None:
        """Take a parameter of which this rank has all."""
        mapping.spread(parameter, self._tensors, rank=0, size=1)

    def start_gather(
        self, mappings: Sequence[Sequence[Mapping]], held: Tensors, *, group: dist.ProcessGroup
    ) -> None:
        """Start to gather parameters of which the ranks of `group` have shards. Collective.

        Args:
            mappings: What each set of ranks has, which follow each other in the group: rank
                `i * shards + j` has shard `j` of each of `mappings[i]`.
            held: This rank's shards, by their first names.
            group: The ranks.
        """
        if group.size() == 1:
            for mapping in mappings[0]:
                self.take(mapping, held[mapping.names[0]])
            return
        gather = _Gather.start(
            mappings, held, group=group, dtype=self._flat.dtype, device=self._flat.device
        )
        self._gathers.append(gather)

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole tensor on every stage. Collective."""
        for gather in self._gathers:
            gather.spread(self._tensors)
        self._gathers.clear()
        if self._pipeline.size() > 1:
            source = dist.get_global_rank(self._pipeline, self._stage)
            dist.broadcast(self._flat, src=source, group=self._pipeline)
        yield from self._tensors.items()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Where a rank's shard of a parameter lies in what the rank contributes."""

    mapping: Mapping
    start: int
    end: int
    shape: Shape


def _lay_out(mappings: Sequence[Mapping], shapes: Sequence[Shape]) -> list[_Part]:
    ends = list(accumulate(math.prod(shape) for shape in shapes))
    return [
        _Part(mapping=mapping, start=start, end=end, shape=shape)
        for mapping, shape, start, end in zip(mappings, shapes, [0, *ends], ends, strict=False)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gather:
    """Shards of several parameters, in one collective that is under way."""

    parts: list[list[_Part]]
    """What each set of ranks contributes."""
    num_shards: int
    """Ranks of each set."""
    gathered: torch.Tensor
    """`[sets, ranks of a set, elements]`."""
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
            _lay_out(each, [_shard_shape(mapping, held, num_shards) for mapping in each])
            for each in mappings
        ]
        # All contribute alike; a set that has fewer parameters leaves the rest as it is.
        num_elements = max(each[-1].end if each else 0 for each in parts)
        own = torch.empty(num_elements, dtype=dtype, device=device)
        for part in parts[group.rank() // num_shards]:
            own[part.start : part.end].view(part.shape).copy_(held[part.mapping.names[0]])
        gathered = own.new_empty(len(mappings), num_shards, num_elements)
        work = _all_gather(gathered.view(-1), own, group=group, async_op=True)
        assert work is not None
        return cls(parts=parts, num_shards=num_shards, gathered=gathered, work=work)

    def spread(self, into: Tensors) -> None:
        """Wait for the collective, and write the shards into the whole tensors."""
        self.work.wait()
        for parts, shards in zip(self.parts, self.gathered, strict=True):
            for part in parts:
                for rank, elements in enumerate(shards):
                    shard = elements[part.start : part.end].view(part.shape)
                    part.mapping.spread(shard, into, rank=rank, size=self.num_shards)


def _shard_shape(mapping: Mapping, held: Tensors, size: int) -> Shape:
    """Return the shape of each rank's shard; what this rank has may be padded."""
    own = held.get(mapping.names[0])
    return mapping.shard_shape(size) if own is None else tuple(own.shape)
