"""All-gathers of a model's shards, many tensors at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rl_batched_data import round_up
from rl_interfaces.backend.runtime import all_gather_single
from rl_refit import block_fp8
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rl_dtensor_worker.parallel.fsdp import local_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLayout:
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
    def of(cls, tensor: torch.Tensor) -> ShardLayout | None:
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
        # Any other placement, as of a user's plan, is gathered by DTensor: see `full_tensor`.
        if not known or dims.get("dp_shard_cp") != 0 or "dp_replicate" in dims:
            return None
        layout = cls(fsdp=sizes["dp_shard_cp"], tp=sizes.get("tp", 1), dim=dims.get("tp"))
        return layout if layout._is_even(tensor.shape) else None

    @classmethod
    def over(cls, group: dist.ProcessGroup | None, tensor: torch.Tensor) -> ShardLayout | None:
        """Return the layout of a tensor that is sharded over the ranks of a group, else None."""
        layout = cls.of(tensor)
        is_over = layout is not None and group is not None and layout.num_ranks == group.size()
        return layout if is_over else None

    @property
    def num_ranks(self) -> int:
        """Ranks that hold one copy."""
        return self.fsdp * self.tp

    def padded_tp_shape(self, shape: torch.Size) -> list[int]:
        """Return the shape of a tensor-parallel shard, its rows padded to equal FSDP chunks."""
        padded = list(shape)
        # FSDP's chunks have `ceil(rows / ranks)` rows; the last ones are shorter, or empty.
        if self.dim is not None:
            padded[self.dim] //= self.tp
        padded[0] = round_up(padded[0], self.fsdp)
        return padded

    def start_of(self, rank: int, shape: torch.Size) -> tuple[int, int]:
        """Return the row and the column of a full matrix with which a rank's shard begins."""
        chunk, part = divmod(rank, self.tp)
        rows = shape[0] // self.tp if self.dim == 0 else shape[0]
        row = min(chunk * (round_up(rows, self.fsdp) // self.fsdp), rows)
        first = part * rows if self.dim == 0 else 0
        return first + row, part * (shape[1] // self.tp) if self.dim == 1 else 0

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
        # Uneven tensor-parallel shards have no common slot size: DTensor gathers them itself.
        return self.num_ranks > 1 and (self.dim is None or shape[self.dim] % self.tp == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """The range of a tensor's shard in the bucket that every rank contributes."""

    start: int
    end: int
    shape: torch.Size
    """Of the full tensor."""
    layout: ShardLayout


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
        shards: Mapping[str, torch.Tensor] | None = None,
    ) -> BucketGather:
        """Start the all-gather of sharded tensors; take replicated ones as they are.

        Args:
            tensors: Names and tensors; sharded ones all have the same wire dtype.
            dtypes: The wire dtype of each.
            group: The ranks that hold one copy. None: nothing is sharded.
            device: Where the full tensors are.
            shards: What stands in the place of a tensor's own shard, by name.
        """
        given = shards or {}
        gather = cls(unsharded={}, slots={}, names=[name for name, _ in tensors])
        own: list[tuple[torch.Tensor, torch.dtype]] = []
        end = 0
        for (name, tensor), dtype in zip(tensors, dtypes, strict=True):
            layout = ShardLayout.over(group, tensor)
            if layout is None:
                is_given = name in given
                gather.unsharded[name] = (
                    given[name] if is_given else full_tensor(tensor, dtype, device)
                )
                continue
            # The size is that of a padded shard: every rank contributes equally many elements.
            start, end = end, end + math.prod(layout.padded_tp_shape(tensor.shape)) // layout.fsdp
            gather.slots[name] = _Slot(start=start, end=end, shape=tensor.shape, layout=layout)
            own.append((given[name] if name in given else local_tensor(tensor), dtype))
        if own and group is not None:
            gather._send(own, end, group, device)
        return gather

    def _send(
        self,
        shards: list[tuple[torch.Tensor, torch.dtype]],
        num_elements: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        (dtype,) = {dtype for _, dtype in shards}
        # Bytes, as not every backend of a collective knows float8.
        sent = torch.uint8 if dtype.itemsize == 1 else dtype
        own = torch.empty(num_elements, dtype=dtype, device=device)
        for (shard, _), slot in zip(shards, self.slots.values(), strict=True):
            # The copy casts. A last shard may be shorter than its slot, whose end stays unset.
            own[slot.start : slot.start + shard.numel()].view(shard.shape).copy_(shard)
        self.gathered = torch.empty(group.size(), num_elements, dtype=dtype, device=device)
        self.work = all_gather_single(
            self.gathered.view(-1).view(sent), own.view(sent), group=group, async_op=True
        )

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the collective; yield name and full tensor, in the order of `start`."""
        if self.work is not None:
            # On a GPU it is the current stream that waits, not the host.
            self.work.wait()
        for name in self.names:
            slot = self.slots.get(name)
            if slot is None:
                yield name, self.unsharded[name]
                continue
            assert self.gathered is not None
            yield name, slot.layout.assemble(self.gathered[:, slot.start : slot.end], slot.shape)


def full_tensor(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a full tensor; collective if it is sharded."""
    # Cast before the gather, for which a narrower wire dtype means fewer bytes.
    cast = tensor.detach().to(device=device, dtype=dtype)
    return cast.full_tensor() if isinstance(cast, DTensor) else cast


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedGather:
    """An all-gather of some matrices in block-FP8 that is in flight.

    Each rank quantises its shard, so that a byte per element is sent. Blocks that lie on several
    ranks have one scale, as their largest values are reduced before.
    """

    values: BucketGather
    scales: Mapping[str, torch.Tensor]

    @classmethod
    def start(
        cls,
        tensors: NamedTensors,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> QuantizedGather:
        """Reduce the blocks' largest values, and start the all-gather.

        Args:
            tensors: Names and matrices.
            dtype: In which the values are quantised, and would be sent otherwise.
            group: The ranks that hold one copy. None: nothing is sharded.
            device: Where the full tensors are.
        """
        shards: dict[str, torch.Tensor] = {}
        starts: dict[str, tuple[int, int]] = {}
        maxima: list[torch.Tensor] = []
        for name, tensor in tensors:
            layout = ShardLayout.over(group, tensor)
            if layout is None or group is None:
                shards[name], starts[name] = full_tensor(tensor, dtype, device), (0, 0)
            else:
                shards[name] = local_tensor(tensor).detach().to(device=device, dtype=dtype)
                starts[name] = layout.start_of(group.rank(), tensor.shape)
            maxima.append(block_fp8.block_maxima(shards[name], tensor.shape, starts[name]))
        joined = torch.cat([each.view(-1) for each in maxima]) if maxima else torch.empty(0)
        if maxima and group is not None:
            dist.all_reduce(joined, op=dist.ReduceOp.MAX, group=group)
        parts = joined.split([each.numel() for each in maxima])
        scales = {
            name: block_fp8.scales_of(part.view(each.shape))
            for name, part, each in zip(shards, parts, maxima, strict=True)
        }
        values = BucketGather.start(
            tensors,
            [block_fp8.DTYPE] * len(tensors),
            group=group,
            device=device,
            shards={
                name: block_fp8.quantize_shard(shard, scales[name], starts[name])
                for name, shard in shards.items()
            },
        )
        return cls(values=values, scales=scales)

    def finish(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Wait for the collective; yield name, values and scales in the order of `start`."""
        for name, values in self.values.finish():
            yield name, values, self.scales[name]
