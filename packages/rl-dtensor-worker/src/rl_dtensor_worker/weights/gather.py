"""Bucketed asynchronous all-gather of DTensor shards: several tensors in one collective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rl_batched_data import round_up
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rl_dtensor_worker.parallel.fsdp import local_tensor
from rl_dtensor_worker.parallel.tensor.collectives import all_gather_single

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _ShardLayout:
    """A tensor sharded by FSDP along dim 0, of its tensor-parallel shard.

    Rank `d * tp + t` has chunk `d` of the rows of tensor-parallel shard `t`.
    """

    fsdp: int
    """Ranks over which FSDP shards dim 0."""
    tp: int
    """Tensor-parallel ranks."""
    dim: int | None
    """The dim that tensor parallelism shards; None: replicated."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _ShardLayout | None:
        """Return the layout of `tensor`; None if it is not sharded, or in another way."""
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
        layout = cls(fsdp=sizes["dp_shard_cp"], tp=sizes.get("tp", 1), dim=dims.get("tp"))
        return layout if layout._is_even(tensor.shape) else None

    @property
    def num_ranks(self) -> int:
        """Ranks that hold one copy."""
        return self.fsdp * self.tp

    def padded_tp_shape(self, shape: torch.Size) -> list[int]:
        """Return the shape of a tensor-parallel shard, its rows padded to equal FSDP chunks."""
        padded = list(shape)
        if self.dim is not None:
            padded[self.dim] //= self.tp
        padded[0] = round_up(padded[0], self.fsdp)
        return padded

    def assemble(self, shards: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the full tensor from padded shards `[ranks, elements]`."""
        padded = self.padded_tp_shape(shape)
        rows = padded[0] // self.fsdp
        # Ranks count tensor parallelism fastest, while rows of one tensor-parallel shard must meet.
        stacked = shards.view(self.fsdp, self.tp, rows, *padded[1:]).transpose(0, 1)
        num_rows = shape[0] // self.tp if self.dim == 0 else shape[0]
        blocks = stacked.reshape(self.tp, *padded)[:, :num_rows]
        if self.tp == 1 or self.dim is None:
            return blocks[0]
        return torch.cat(list(blocks), dim=self.dim)

    def _is_even(self, shape: torch.Size) -> bool:
        return self.num_ranks > 1 and (self.dim is None or shape[self.dim] % self.tp == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """The range of a tensor's shard in the bucket that every rank contributes."""

    start: int
    end: int
    shape: torch.Size
    """Of the full tensor."""
    layout: _ShardLayout


@dataclass(kw_only=True, slots=True)
class BucketGather:
    """An all-gather of some tensors that is in flight."""

    unsharded: dict[str, torch.Tensor]
    """Tensors that this collective does not carry."""
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
    ) -> BucketGather:
        """Start the all-gather of sharded tensors; take replicated ones as they are.

        Args:
            tensors: Names and tensors; sharded ones all have the same wire dtype.
            dtypes: The wire dtype of each.
            group: The ranks that hold one copy. None: nothing is sharded.
            device: Where the full tensors are.
        """
        gather = cls(unsharded={}, slots={}, names=[name for name, _ in tensors])
        shards: list[tuple[torch.Tensor, torch.dtype]] = []
        end = 0
        for (name, tensor), dtype in zip(tensors, dtypes, strict=True):
            layout = _ShardLayout.of(tensor)
            if layout is None or group is None or layout.num_ranks != group.size():
                gather.unsharded[name] = _full(tensor, dtype, device)
                continue
            start, end = end, end + math.prod(layout.padded_tp_shape(tensor.shape)) // layout.fsdp
            gather.slots[name] = _Slot(start=start, end=end, shape=tensor.shape, layout=layout)
            shards.append((local_tensor(tensor), dtype))
        if shards and group is not None:
            gather._send(shards, end, group, device)
        return gather

    def _send(
        self,
        shards: list[tuple[torch.Tensor, torch.dtype]],
        num_elements: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        (dtype,) = {dtype for _, dtype in shards}
        own = torch.empty(num_elements, dtype=dtype, device=device)
        for (shard, _), slot in zip(shards, self.slots.values(), strict=True):
            own[slot.start : slot.start + shard.numel()].view(shard.shape).copy_(shard)
        self.gathered = torch.empty(group.size(), num_elements, dtype=dtype, device=device)
        self.work = all_gather_single(self.gathered.view(-1), own, group=group, async_op=True)

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the collective; yield name and full tensor, in the order of `start`."""
        if self.work is not None:
            self.work.wait()
        for name in self.names:
            slot = self.slots.get(name)
            if slot is None:
                yield name, self.unsharded[name]
                continue
            assert self.gathered is not None
            yield name, slot.layout.assemble(self.gathered[:, slot.start : slot.end], slot.shape)


def _full(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    cast = tensor.detach().to(device=device, dtype=dtype)
    return cast.full_tensor() if isinstance(cast, DTensor) else cast
