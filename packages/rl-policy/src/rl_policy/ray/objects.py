"""What crosses Ray: a batch on its way to the ranks, and a rank's result on its way back.

    driver                        object store of a node          ranks of the node
    columns, plans --put, once--> block: the rows of the node --> own rows, by the plan
                   --with the call, for each rank---------------> the rank's plan

A block has the rows that the ranks of a node need, so that a node receives no others: on a single
node these are all rows, and the driver copies each column once. Within `BatchStore.keeping` the
columns that a call has put are there for the next one, which puts the new ones alone. A column that
a call does not have is dropped, so that no more is held than the columns of one batch.

A result comes back as one buffer that has all its numbers:

    {"global_loss": float32 [1], "rank": 0, "all_mb_metrics": {"lr": [1e-3, 1e-3]}}
    -> structure {"global_loss": <4 bytes at 0>, "rank": 0, "all_mb_metrics": {"lr": <floats 0, 1>}}
       numbers   uint8 [33]: 16 for the floats, 16 for the tensor, and one at the end

Ray pickles each tensor with a storage of its own, and each number of a list as an object, which the
driver would unpickle for every rank. A `BatchedDataDict` needs no packing: its columns are buffers.
A relay joins the results of its ranks, batches too, in one such buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import ray
import torch
from rl_batched_data import BatchedDataDict

if TYPE_CHECKING:
    from rl_batched_data.sharding import ShardPlan

# Of the largest dtype, so that a view of any starts at a multiple of its size.
_ALIGNMENT = 16


class _Kept(NamedTuple):
    """A column that is in the object store."""

    column: object
    """Held, as its `id` is the key."""
    version: int | None
    block: ray.ObjectRef
    """A batch that has the column, under the key by which it was put."""
    key: str

    @property
    def is_current(self) -> bool:
        """Whether the column has not changed since; what changes without a trace counts as new."""
        return self.version is not None and self.version == _version(self.column)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsOfRank:
    """Where a rank finds its rows: the arguments of `take_rows`, small enough to go with a call."""

    plan: ShardPlan
    """The rank's rows, as indices into the rows of its node's blocks."""
    sources: Mapping[str, tuple[int, str]]
    """For each column the block that has it, and its key there."""
    blocks: tuple[ray.ObjectRef, ...]


class BatchStore:
    """Puts the batches of a worker group's calls into the object store.

    Args:
        nodes: The node of each data-parallel coordinate's ranks, several if they stand on several.
    """

    def __init__(self, nodes: Sequence[frozenset[str]]) -> None:
        self._nodes = list(nodes)
        self._kept: dict[tuple[int, bytes], _Kept] = {}
        self._is_keeping = False
        self.num_puts = 0
        """Objects that were put so far."""

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what a call puts for the next one; it may be entered again within itself.

        Nothing is kept after it. Tensors must not change meanwhile but by torch's own operations,
        which are noticed.
        """
        before, self._is_keeping = self._is_keeping, True
        try:
            yield
        finally:
            self._is_keeping = before
            if not before:
                self._kept.clear()

    def put(self, data: BatchedDataDict, plans: Sequence[ShardPlan]) -> list[dict[str, RowsOfRank]]:
        """Return, for each data-parallel coordinate, what its ranks on each of its nodes take.

        Args:
            data: The full batch.
            plans: The rows of each coordinate.
        """
        if len(plans) != len(self._nodes):
            raise ValueError(f"{len(plans)} shards do not fit data_parallel={len(self._nodes)}")
        on_node: dict[str, list[int]] = {}
        for coordinate, nodes in enumerate(self._nodes):
            for node in nodes:
                on_node.setdefault(node, []).append(coordinate)
        placed: list[dict[str, RowsOfRank]] = [{} for _ in plans]
        is_single = len(on_node) == 1
        before, self._kept = self._kept, {}
        try:
            for node, coordinates in on_node.items():
                rows = None if is_single else _union(plans, coordinates, num_rows=data.size)
                sources, blocks = self._put_columns(data, rows, before)
                for coordinate in coordinates:
                    plan = plans[coordinate] if rows is None else _within(plans[coordinate], rows)
                    placed[coordinate][node] = RowsOfRank(plan=plan, sources=sources, blocks=blocks)
        finally:
            if not self._is_keeping:
                self._kept.clear()
        return placed

    def _put_columns(
        self,
        data: BatchedDataDict,
        rows: torch.Tensor | None,
        before: Mapping[tuple[int, bytes], _Kept],
    ) -> tuple[dict[str, tuple[int, str]], tuple[ray.ObjectRef, ...]]:
        """Put the columns that are not there; return where each column is, and the blocks.

        Args:
            data: The full batch.
            rows: Which rows to put, `[rows]` int64. None: all.
            before: What the last call has put, or found there.
        """
        chosen = b"" if rows is None else rows.numpy().tobytes()
        new: list[str] = []
        for key, column in data.items():
            place = (id(column), chosen)
            # Also of this call: two nodes may need the same rows.
            found = self._kept.get(place, before.get(place))
            if found is not None and found.is_current:
                self._kept[place] = found
            else:
                new.append(key)
        if new:
            block = BatchedDataDict({key: data[key] for key in new})
            put = ray.put(block if rows is None else block.select_indices(rows))
            self.num_puts += 1
            for key in new:
                column = data[key]
                self._kept[id(column), chosen] = _Kept(column, _version(column), put, key)
        kept = {key: self._kept[id(column), chosen] for key, column in data.items()}
        blocks = tuple(dict.fromkeys(each.block for each in kept.values()))
        places = {block: place for place, block in enumerate(blocks)}
        return {key: (places[each.block], each.key) for key, each in kept.items()}, blocks


def take_rows(
    plan: ShardPlan, sources: Mapping[str, tuple[int, str]], blocks: Sequence[BatchedDataDict]
) -> BatchedDataDict:
    """Return a rank's shard of a batch that `BatchStore` has put."""
    columns = {key: blocks[place][name] for key, (place, name) in sources.items()}
    return BatchedDataDict(columns).apply_plan(plan)


def _union(plans: Sequence[ShardPlan], chosen: Sequence[int], *, num_rows: int) -> torch.Tensor:
    """Return the rows of the chosen plans, ascending, each once."""
    is_needed = torch.zeros(num_rows, dtype=torch.bool)
    for index in chosen:
        is_needed[torch.tensor(plans[index].rows, dtype=torch.int64)] = True
    return is_needed.nonzero()[:, 0]


def _within(plan: ShardPlan, rows: torch.Tensor) -> ShardPlan:
    """Return the plan in indices into `rows`, which ascend."""
    own = torch.tensor(plan.rows, dtype=torch.int64)
    return replace(plan, rows=torch.searchsorted(rows, own).tolist())


def _version(column: object) -> int | None:
    """Return a number that torch raises at each change in place; None if there is none."""
    if isinstance(column, torch.Tensor) and not column.is_inference():
        return column._version
    return None


class _Numbers(NamedTuple):
    """Where the buffer has a tensor."""

    start: int
    """The first byte after the floats."""
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Floats(NamedTuple):
    """Which of the buffer's floats are a list."""

    start: int
    end: int


class _Columns(NamedTuple):
    """A `BatchedDataDict` of tensors."""

    places: dict[str, _Numbers]


@dataclass(frozen=True, slots=True)
class PackedResult:
    """What `pack_result` returns."""

    structure: Any
    """The result, with `_Numbers`, `_Floats` and `_Columns` in place of what the buffer has."""
    numbers: BatchedDataDict
    """`bytes` uint8 `[bytes]`, which the driver reads in place: first all floats as float64."""
    num_floats: int


def pack_result(result: object) -> object:
    """Return a dict of a worker as a `PackedResult`, and anything else as it is."""
    return _pack(result) if type(result) is dict else result


def join_results(results: Mapping[int, object]) -> PackedResult:
    """Return the results of some ranks, each packed or not, as one of `{rank: result}`."""
    return _pack({rank: unpack_result(result) for rank, result in results.items()})


def _pack(result: dict[Any, object]) -> PackedResult:
    floats: list[float] = []
    pieces: list[torch.Tensor] = []
    size = 0

    def pack_tensor(tensor: torch.Tensor) -> _Numbers:
        nonlocal size
        piece, start = tensor.contiguous().reshape(-1).view(torch.uint8), size
        size += _aligned(len(piece))
        pieces.extend([piece, piece.new_zeros(size - start - len(piece))])
        return _Numbers(start, start + len(piece), tensor.dtype, tuple(tensor.shape))

    def pack(value: object) -> object:
        if type(value) is dict:
            return {key: pack(entry) for key, entry in value.items()}
        if _is_floats(value):
            floats.extend(value)
            return _Floats(len(floats) - len(value), len(floats))
        if _is_plain(value):
            return pack_tensor(value)
        if type(value) is BatchedDataDict and all(map(_is_plain, value.values())):
            return _Columns({key: pack_tensor(column) for key, column in value.items()})
        return value

    structure = pack(result)
    head = torch.zeros(_aligned(8 * len(floats)) // 8, dtype=torch.float64)
    head[: len(floats)] = torch.tensor(floats, dtype=torch.float64)
    # Never empty: an empty array that was pickled has no strides by which it could be viewed.
    buffer = torch.cat([head.view(torch.uint8), *pieces, torch.zeros(1, dtype=torch.uint8)])
    return PackedResult(structure, BatchedDataDict(bytes=buffer), len(floats))


def unpack_result(result: object) -> Any:
    """Return what `pack_result` was given. Tensors are read-only views of the buffer."""
    if not isinstance(result, PackedResult):
        return result
    buffer: torch.Tensor = result.numbers["bytes"]
    # All at once: a call of torch for each list would take longer than its numbers.
    floats: list[float] = buffer[: 8 * result.num_floats].view(torch.float64).tolist()
    tensors = buffer[_aligned(8 * result.num_floats) :]

    def tensor_at(place: _Numbers) -> torch.Tensor:
        return tensors[place.start : place.end].view(place.dtype).view(place.shape)

    def unpack(value: object) -> object:
        if type(value) is dict:
            return {key: unpack(entry) for key, entry in value.items()}
        if type(value) is _Floats:
            return floats[value.start : value.end]
        if type(value) is _Numbers:
            return tensor_at(value)
        if type(value) is _Columns:
            places = value.places.items()
            return BatchedDataDict({key: tensor_at(place) for key, place in places})
        return value

    return unpack(result.structure)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _is_floats(value: object) -> TypeGuard[list[float]]:
    return type(value) is list and len(value) > 0 and all(type(entry) is float for entry in value)


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor is its bytes: dense, on the CPU, without a gradient."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_quantized)
        and not (value.is_conj() or value.is_neg())
    )
