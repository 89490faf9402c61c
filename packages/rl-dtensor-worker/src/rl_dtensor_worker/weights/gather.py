"""Tensors that ranks have parts of, on their way to being whole: several in one collective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rl_dtensor_worker.parallel.fsdp import local_tensor
from rl_dtensor_worker.parallel.tensor.collectives import all_gather_single

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """How a tensor lies on the ranks that have parts of it: rows over rows, over tensor parallel.

    Rank `d * tensor + t` has rows `d` of the part `t` of the tensor.
    """

    rows: int
    """Ranks over which FSDP cuts the first dimension."""
    tensor: int
    """Ranks that share the layer."""
    dim: int | None
    """The dimension that those cut; None where each has all of it."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Cut | None:
        """Return how `tensor` is cut; None where it is not, or in a way of its own."""
        if not isinstance(tensor, DTensor):
            return None
        sizes: dict[str, int] = {}
        dims: dict[str, int] = {}
        mesh = tensor.device_mesh
        for axis, placement in enumerate(tensor.placements):
            name = (mesh.mesh_dim_names or ("",) * mesh.ndim)[axis]
            sizes[name] = mesh.size(axis)
            if isinstance(placement, (Shard, _StridedShard)):
                dims[name] = placement.dim
        known = sizes.keys() <= {"dp_replicate", "dp_shard_cp", "tp"}
        if not known or dims.get("dp_shard_cp") != 0 or "dp_replicate" in dims:
            return None
        cut = cls(rows=sizes["dp_shard_cp"], tensor=sizes.get("tp", 1), dim=dims.get("tp"))
        return cut if cut._is_even(tensor.shape) else None

    @property
    def num_ranks(self) -> int:
        """How many ranks have parts."""
        return self.rows * self.tensor

    def part_shape(self, shape: torch.Size) -> list[int]:
        """Return the shape of what the ranks of one row group share, completed to equal rows."""
        part = list(shape)
        if self.dim is not None:
            part[self.dim] //= self.tensor
        part[0] = -(-part[0] // self.rows) * self.rows
        return part

    def join(self, parts: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the tensor whose parts are given, `[ranks, elements]`, each completed."""
        part = self.part_shape(shape)
        rows = part[0] // self.rows
        stacked = parts.view(self.rows, self.tensor, rows, *part[1:]).transpose(0, 1)
        num_rows = shape[0] // self.tensor if self.dim == 0 else shape[0]
        blocks = stacked.reshape(self.tensor, *part)[:, :num_rows]
        if self.tensor == 1 or self.dim is None:
            return blocks[0]
        return torch.cat(list(blocks), dim=self.dim)

    def _is_even(self, shape: torch.Size) -> bool:
        return self.num_ranks > 1 and (self.dim is None or shape[self.dim] % self.tensor == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """Where the part of a tensor lies in what every rank contributes."""

    start: int
    end: int
    shape: torch.Size
    """Of the whole tensor."""
    cut: _Cut


@dataclass(kw_only=True, slots=True)
class Gather:
    """Some tensors, in one collective that is under way."""

    whole: dict[str, torch.Tensor]
    slots: dict[str, _Slot]
    names: list[str]
    gathered: torch.Tensor | None = None
    work: dist.Work | None = None

    @classmethod
    def start(
        cls,
        tensors: NamedTensors,
        dtypes: list[torch.dtype],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> Gather:
        """Start to gather what is cut; take the rest as it is."""
        gather = cls(whole={}, slots={}, names=[name for name, _ in tensors])
        parts: list[tuple[torch.Tensor, torch.dtype]] = []
        end = 0
        for (name, tensor), dtype in zip(tensors, dtypes, strict=True):
            cut = _Cut.of(tensor)
            if cut is None or group is None or cut.num_ranks != group.size():
                gather.whole[name] = _whole(tensor, dtype, device)
                continue
            start, end = end, end + math.prod(cut.part_shape(tensor.shape)) // cut.rows
            gather.slots[name] = _Slot(start=start, end=end, shape=tensor.shape, cut=cut)
            parts.append((local_tensor(tensor), dtype))
        if parts and group is not None:
            gather._send(parts, end, group, device)
        return gather

    def _send(
        self,
        parts: list[tuple[torch.Tensor, torch.dtype]],
        num_elements: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        (dtype,) = {dtype for _, dtype in parts}
        own = torch.empty(num_elements, dtype=dtype, device=device)
        for (part, _), slot in zip(parts, self.slots.values(), strict=True):
            own[slot.start : slot.start + part.numel()].view(part.shape).copy_(part)
        self.gathered = torch.empty(group.size(), num_elements, dtype=dtype, device=device)
        self.work = all_gather_single(self.gathered.view(-1), own, group=group, async_op=True)

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the collective, and yield name and whole tensor."""
        if self.work is not None:
            self.work.wait()
        for name in self.names:
            slot = self.slots.get(name)
            if slot is None:
                yield name, self.whole[name]
                continue
            assert self.gathered is not None
            yield name, slot.cut.join(self.gathered[:, slot.start : slot.end], slot.shape)


def _whole(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    cast = tensor.detach().to(device=device, dtype=dtype)
    return cast.full_tensor() if isinstance(cast, DTensor) else cast
