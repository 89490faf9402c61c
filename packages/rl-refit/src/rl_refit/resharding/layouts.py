"""Where the elements of tensors lie over ranks: of real DTensors, and from degrees alone."""

# torch annotates DTensors only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_refit.plan import TensorSpec, layer_of
from rl_refit.resharding.slices import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Placed(NamedTuple):
    """One box of one tensor, and the ranks that each have or want it."""

    name: str
    box: Box
    ranks: tuple[int, ...]


class Shard(NamedTuple):
    """What this rank holds of one tensor."""

    shape: tuple[int, ...]
    """Of the full tensor."""
    box: Box
    data: torch.Tensor
    """The box's elements: a view, not a copy."""


def local_shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shard]:
    """Return what this rank holds: a plain tensor in full, of a DTensor its shard.

    Shards of FSDP2 over tensor parallelism (`_StridedShard`) and uneven ones are known, and
    replicas are. A rank whose shard is empty has no entry.

    Raises:
        ValueError: The values of a tensor are yet to be summed over ranks (`Partial`), a shard is
            no box of the tensor, or torch says another shape of the shard than it has.
    """
    found = {name: _local_shard(name, tensor.detach()) for name, tensor in tensors.items()}
    return {name: shard for name, shard in found.items() if shard.data.numel()}


def _local_shard(name: str, tensor: torch.Tensor) -> Shard:
    if not hasattr(tensor, "full_tensor"):
        return Shard(tuple(tensor.shape), Box.full(tuple(tensor.shape)), tensor)
    # Here, as importing DTensor takes longer than importing this package.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{name} has the placements {tensor.placements}: reduce it first")
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    data = tensor.to_local()
    if tuple(shape) != tuple(data.shape):
        raise ValueError(
            f"{name}: the shard of {list(tensor.shape)} under {tensor.placements} has the shape "
            f"{list(data.shape)}, torch computes {list(shape)}"
        )
    if data.numel():
        _require_ranges(name, tensor)
    return Shard(tuple(tensor.shape), Box(tuple(offset), tuple(shape)), data)


def _require_ranges(name: str, tensor: DTensor) -> None:
    """Raise where a `_StridedShard` has indices that are no range: torch gives the first alone."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    dims: list[int | None] = [getattr(each, "dim", None) for each in tensor.placements]
    strided = {
        d for d, p in zip(dims, tensor.placements, strict=True) if hasattr(p, "split_factor")
    }
    for dim in strided:
        assert dim is not None
        indices = torch.arange(tensor.shape[dim])
        for axis, placement in enumerate(tensor.placements):
            if dims[axis] == dim:
                parts = indices.chunk(getattr(placement, "split_factor", 1))
                chunks = [part.chunk(tensor.device_mesh.size(axis)) for part in parts]
                indices = torch.cat(
                    [each[coordinate[axis]] for each in chunks if coordinate[axis] < len(each)]
                )
        if int(indices[-1] - indices[0]) + 1 != len(indices):
            raise ValueError(
                f"{name}: the shard of {list(tensor.shape)} under {tensor.placements} has indices "
                f"of dim {dim} that are not consecutive: redistribute it first"
            )


def merge_ranks(entries: Iterable[tuple[str, Box, int]]) -> list[Placed]:
    """Return each distinct box once, with all of its ranks in ascending order."""
    ranks: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for name, box, rank in entries:
        ranks[name, box].append(rank)
    return [Placed(name, box, tuple(sorted(set(r)))) for (name, box), r in ranks.items()]


_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ROWS = re.compile(
    r"\.(q_proj|k_proj|v_proj|q_b_proj|kv_b_proj|gate_proj|up_proj)\.|embed_tokens|lm_head"
)
_COLUMNS = re.compile(r"\.(o_proj|down_proj)\.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Parallel degrees, and the boxes of a model's tensors that follow from them.

    It says where the tensors of a transformer in Hugging Face's names lie without any process: on
    trainers, and on engines, whose instances are `replicas`. Ranks count tensor parallelism
    fastest, then FSDP, replicas and pipeline stages. Experts are spread over all ranks of a stage:
    `ep` neighbours hold different ones. Stages hold neighbouring layers with about equal bytes.

    Attributes:
        tp: Tensor-parallel ranks; experts are not sharded by it.
        fsdp: Ranks that share the rows of a tensor (of its tensor-parallel shard).
        ep: Ranks over which experts are spread; it divides `tp * fsdp * replicas`.
        pp: Pipeline stages.
        replicas: Copies of everything.
        first_rank: The first rank's number.

    Raises:
        ValueError: A degree is not positive, or `ep` does not divide the ranks of a stage.
    """

    tp: int = 1
    fsdp: int = 1
    ep: int = 1
    pp: int = 1
    replicas: int = 1
    first_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "fsdp", "ep", "pp", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive")
        if self.stage_ranks % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide the {self.stage_ranks} ranks of a stage"
            )

    @property
    def stage_ranks(self) -> int:
        """The ranks of one pipeline stage."""
        return self.tp * self.fsdp * self.replicas

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.stage_ranks * self.pp

    def place(self, specs: Sequence[TensorSpec]) -> list[Placed]:
        """Return every box and its ranks, tensor by tensor.

        Raises:
            ValueError: `tp` does not divide a dim, or `ep` the number of experts.
        """
        stages = self._stages(specs)
        indices = [int(m.group(1)) for spec in specs if (m := _EXPERT.search(spec.name))]
        num_experts = max(indices, default=-1) + 1
        if num_experts % self.ep:
            raise ValueError(f"ep={self.ep} does not divide the {num_experts} experts")
        placed: list[Placed] = []
        for spec in specs:
            first = self.first_rank + stages[layer_of(spec.name)] * self.stage_ranks
            expert = _EXPERT.search(spec.name)
            if expert:
                owner = int(expert.group(1)) * self.ep // num_experts
                placed += self._place_expert(spec, first, owner)
            else:
                placed += self._place_dense(spec, first)
        return placed

    def _place_expert(self, spec: TensorSpec, first: int, owner: int) -> Iterable[Placed]:
        copies = self.stage_ranks // self.ep
        shards = max(1, min(copies, self.fsdp * self.tp // self.ep))
        holders = [first + owner + self.ep * copy for copy in range(copies)]
        for index, (start, size) in enumerate(_chunks(spec.shape[0], shards)):
            box = Box((start, *(0,) * (len(spec.shape) - 1)), (size, *spec.shape[1:]))
            yield Placed(spec.name, box, tuple(holders[index::shards]))

    def _place_dense(self, spec: TensorSpec, first: int) -> Iterable[Placed]:
        dim = 0 if _ROWS.search(spec.name) else 1 if _COLUMNS.search(spec.name) else None
        parts = self.tp if dim is not None else 1
        if dim is not None and spec.shape[dim] % parts:
            raise ValueError(f"tp={self.tp} does not divide dim {dim} of {spec}")
        for part in range(parts):
            box = Box.full(spec.shape)
            if dim is not None:
                size = spec.shape[dim] // parts
                offset = tuple(part * size * (axis == dim) for axis in range(len(spec.shape)))
                shape = tuple(size if axis == dim else full for axis, full in enumerate(spec.shape))
                box = Box(offset, shape)
            for index, (start, size) in enumerate(_chunks(box.shape[0], self.fsdp)):
                rows = Box((box.offset[0] + start, *box.offset[1:]), (size, *box.shape[1:]))
                inner = range(part, part + 1) if parts > 1 else range(self.tp)
                ranks = tuple(
                    first + (copy * self.fsdp + index) * self.tp + each
                    for copy in range(self.replicas)
                    for each in inner
                )
                yield Placed(spec.name, rows, ranks)

    def _stages(self, specs: Sequence[TensorSpec]) -> dict[str, int]:
        sizes: dict[str, int] = defaultdict(int)
        for spec in specs:
            sizes[layer_of(spec.name)] += spec.nbytes
        total, before, stages = sum(sizes.values()), 0, dict[str, int]()
        for layer, size in sizes.items():
            # By the middle of its bytes, so that a layer goes where most of it would be.
            stages[layer] = (2 * before + size) * self.pp // (2 * total) if total else 0
            before += size
        return stages


def _chunks(size: int, num: int) -> Iterable[tuple[int, int]]:
    """Return start and size of the non-empty chunks of a dim, as `torch.chunk` makes them."""
    step = -(-size // num)
    return [(start, min(step, size - start)) for start in range(0, size, step or 1)]
