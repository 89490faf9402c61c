"""The batch that every package speaks: a mapping whose values share their first axis."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist

from rl_batched_data import columns
from rl_batched_data.columns import Column
from rl_batched_data.gathering import gather_columns
from rl_batched_data.packed_tensor import PackedTensor
from rl_batched_data.sharding import ShardPlan, balanced_bounds, check_positive, plan_shards

SpecT = TypeVar("SpecT")

_PLAN_ATTRIBUTES = ("elem_counts_per_gb", "micro_batch_indices", "micro_batch_lengths")


class BatchedDataDict(UserDict[str, Any], Generic[SpecT]):
    """A mapping of names to tensors, lists and `PackedTensor`s with one entry per row.

    The type parameter names the TypedDict of the keys: `BatchedDataDict[GenerationDatumSpec]`.

    A batch that was unpickled may share its memory with other processes: it is to be read only,
    and `writable()` gives a copy.

    Example, two rows:
        batch = BatchedDataDict({"input_ids": torch.tensor([[1, 2], [3, 0]]), "text": ["a", "b"]})
        batch.size           -> 2
        batch.slice(1, 2)    -> SlicedDataDict(size=1, input_ids=int64[1, 2], text=list[1])
    """

    def __setitem__(self, key: str, item: Any) -> None:
        if not isinstance(item, torch.Tensor | list | PackedTensor):
            raise TypeError(
                f"{key!r} is a {type(item).__name__}, expected a tensor, a list or a PackedTensor"
            )
        super().__setitem__(key, item)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchedDataDict):
            return NotImplemented
        theirs: dict[str, Column] = other.data
        return self.keys() == theirs.keys() and all(
            columns.equal(column, theirs[key]) for key, column in self.data.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        described = [f"{key}={columns.describe(column)}" for key, column in self.data.items()]
        return f"{type(self).__name__}({', '.join([f'size={self.size}', *described])})"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        views = {key: columns.to_picklable_column(column) for key, column in self.data.items()}
        return _rebuild, (type(self), views, self._plan_attributes())

    def _plan_attributes(self) -> dict[str, Any]:
        return {}

    @property
    def size(self) -> int:
        """The number of rows; 0 without keys."""
        return next((columns.num_rows(column) for column in self.data.values()), 0)

    def check_sizes(self) -> None:
        """Raise a `ValueError` that names keys and sizes, unless all entries have `size` rows."""
        sizes = {key: columns.num_rows(column) for key, column in self.data.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"entries of a batch differ in their number of rows: {sizes}")

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> Self:
        """Return the rows of all `batches`, in order; an empty batch when there are none.

        Tensors with two or more axes are padded on the right, in every axis but the first, to the
        widest of the batches.

        Args:
            batches: Batches, or plain dicts, with the same keys and dtypes.
            pad_value_dict: The value to pad with per key; 0 where it names none.

        Raises:
            ValueError: Keys, kinds or dtypes differ; names the key.
        """
        if not batches:
            return cls()
        keys = list(batches[0])
        for position, batch in enumerate(batches):
            if odd := set(keys) ^ set(batch):
                raise ValueError(f"batch {position} differs from batch 0 in the keys {sorted(odd)}")
        pad_values = dict(pad_value_dict or {})
        return cls(
            {
                key: columns.concat(key, [batch[key] for batch in batches], pad_values.get(key, 0))
                for key in keys
            }
        )

    def slice(self, start: int, end: int) -> SlicedDataDict[SpecT]:
        """Return rows `start` to `end`, sharing the memory of their tensors.

        Raises:
            ValueError: Not `0 <= start <= end <= size`.
        """
        if not 0 <= start <= end <= self.size:
            raise ValueError(f"rows {start}..{end} are not within the {self.size} rows")
        return SlicedDataDict(self._map(lambda column: columns.slice_rows(column, start, end)))

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict[SpecT]:
        """Return a copy of part `rank` of `chunks` consecutive ones, which differ by at most a row.

        Raises:
            ValueError: Not `0 <= rank < chunks`.
        """
        check_positive("chunks", chunks)
        if not 0 <= rank < chunks:
            raise ValueError(f"rank={rank} is not within 0..{chunks - 1}")
        start, end = balanced_bounds(0, self.size, parts=chunks)[rank]
        return SlicedDataDict(
            self._map(lambda column: columns.clone(columns.slice_rows(column, start, end)))
        )

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> BatchedDataDict[SpecT]:
        """Return a copy of the rows at `indices`, in that order; an index may come repeatedly.

        Raises:
            ValueError: An index is not within the rows.
        """
        index = torch.as_tensor(indices, device="cpu").to(torch.int64)
        outside = index[(index < 0) | (index >= self.size)]
        if len(outside):
            raise ValueError(f"index {int(outside[0])} is not within the {self.size} rows")
        return BatchedDataDict(self._map(lambda column: columns.select_rows(column, index)))

    def repeat_interleave(self, num_repeats: int) -> BatchedDataDict[SpecT]:
        """Return every row `num_repeats` times in a row; what lists hold is copied deeply."""
        return BatchedDataDict(self._map(lambda column: columns.repeat_rows(column, num_repeats)))

    def reorder_data(self, order: Sequence[int]) -> Self:
        """Put row `j` at position `order[j]`, in place, and return self.

        With the `order` that `shard_by_batch_size` returned, this restores the caller's order. A
        micro-batch plan does not survive it.

        Raises:
            ValueError: `order` is no permutation of the rows.
        """
        if sorted(order) != list(range(self.size)):
            raise ValueError(
                f"order, of {len(order)} numbers, is not a permutation of the {self.size} rows"
            )
        inverse = torch.empty(len(order), dtype=torch.int64)
        inverse[torch.as_tensor(order, dtype=torch.int64)] = torch.arange(len(order))
        self.data.update(self._map(lambda column: columns.select_rows(column, inverse)))
        return self

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut every tensor that has an axis `dim` to at most `truncated_len` there, in place.

        Raises:
            ValueError: `dim` is the batch axis.
        """
        if dim < 1:
            raise ValueError(f"dim={dim} must be at least 1: axis 0 is the batch")
        for key, column in self.data.items():
            if isinstance(column, torch.Tensor) and column.ndim > dim:
                self.data[key] = column.narrow(dim, 0, min(truncated_len, column.shape[dim]))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Move every tensor to `device` and return self."""
        for key, column in self.data.items():
            if not isinstance(column, list):
                self.data[key] = column.to(device, non_blocking=non_blocking)
        return self

    def writable(self) -> Self:
        """Return a copy that shares no memory and may be written to."""
        copied = self.copy()
        copied.data.update(self._map(columns.clone))
        return copied

    def get_dict(self) -> dict[str, Any]:
        """Return a plain dict of the same values."""
        return dict(self.data)

    def get_batch(self, batch_idx: int, batch_size: int) -> SlicedDataDict[SpecT]:
        """Return global batch `batch_idx`, the last of which may be short, without copying.

        Args:
            batch_idx: Which one, from 0.
            batch_size: Rows of a global batch.

        Raises:
            ValueError: There is no such global batch.
        """
        check_positive("batch_size", batch_size)
        start = batch_idx * batch_size
        if not 0 <= start <= self.size:
            raise ValueError(
                f"there is no global batch {batch_idx} of {batch_size} rows in {self.size} rows"
            )
        return self.slice(start, min(start + batch_size, self.size))

    def make_microbatch_iterator(self, micro_batch_size: int) -> Iterator[SlicedDataDict[SpecT]]:
        """Yield `micro_batch_size` rows at a time, the last time what is left, without copying.

        Raises:
            ValueError: `micro_batch_size` is not positive.
        """
        check_positive("micro_batch_size", micro_batch_size)
        starts = range(0, self.size, micro_batch_size)
        return (self.slice(low, min(low + micro_batch_size, self.size)) for low in starts)

    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> list[SlicedDataDict[SpecT]]:
        """Return the rows of each shard: a part of every global batch, in the order of those.

        Example, rows [0..7], shards=2, batch_size=4:
            [0, 1, 4, 5] and [2, 3, 6, 7]

        Args:
            shards: Number of shards, one per data-parallel rank.
            batch_size: Rows of a global batch; the whole batch when None.
            allow_uneven_shards: Take any number of rows. The parts of a global batch then differ
                by at most one row, and may be empty: 9 rows over 8 shards are 2,1,1,1,1,1,1,1.

        Raises:
            ValueError: The entries differ in size, or the numbers do not divide.
        """
        self.check_sizes()
        plans = plan_shards(
            self.size,
            shards=shards,
            batch_size=batch_size,
            allow_uneven_shards=allow_uneven_shards,
        )
        return [self._apply(plan) for plan in plans]

    def all_gather(
        self,
        group: dist.ProcessGroup | None = None,
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> BatchedDataDict[SpecT]:
        """Return the rows of all ranks of `group`, in rank order, on every rank.

        Ranks may differ in their number of rows and in widths, see `from_batches`.

        Args:
            group: The ranks that take part; the default group when None. Tensors lie on a device
                that its backend can send from.
            pad_value_dict: The value to pad with per key; 0 where it names none.
        """
        parts = gather_columns(self.data, group)
        return BatchedDataDict[SpecT].from_batches(parts, pad_value_dict)

    def _map(self, operation: Callable[[Column], Column]) -> dict[str, Column]:
        self.check_sizes()
        return {key: operation(column) for key, column in self.data.items()}

    def _apply(self, plan: ShardPlan) -> SlicedDataDict[SpecT]:
        rows = plan.rows
        if rows == list(range(rows[0], rows[0] + len(rows)) if rows else []):
            start = rows[0] if rows else 0
            entries = self._map(lambda column: columns.slice_rows(column, start, start + len(rows)))
        else:
            index = torch.tensor(rows, dtype=torch.int64)
            entries = self._map(lambda column: columns.select_rows(column, index))
        shard: SlicedDataDict[SpecT] = SlicedDataDict(entries)
        for name in _PLAN_ATTRIBUTES:
            setattr(shard, name, getattr(plan, name))
        return shard


class SlicedDataDict(BatchedDataDict[SpecT]):
    """Some rows of a batch, and the plan by which a worker goes through them.

    The plan is empty (None) unless `shard_by_batch_size` made it. It survives pickling.
    """

    elem_counts_per_gb: list[int] | None = None
    """Rows of each global batch."""
    micro_batch_indices: list[list[list[int]]] | None = None
    """Per global batch, `[start, end)` of each micro-batch, counted from that global batch."""
    micro_batch_lengths: list[list[int]] | None = None
    """Per global batch, the width (dynamic) or the tokens (packed) of each micro-batch."""

    def _plan_attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _PLAN_ATTRIBUTES}

    def reorder_data(self, order: Sequence[int]) -> Self:
        """Put row `j` at position `order[j]`, in place, drop the plan, and return self."""
        super().reorder_data(order)
        for name in _PLAN_ATTRIBUTES:
            setattr(self, name, None)
        return self

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict[SpecT]:
        """Return global batch `batch_idx` with its part of the plan, without copying.

        Args:
            batch_idx: Which one, from 0.
            batch_size: Rows of a global batch; None follows the plan.

        Raises:
            ValueError: There is no such global batch, or neither a plan nor a `batch_size`.
        """
        if batch_size is not None:
            return super().get_batch(batch_idx, batch_size)
        counts = self.elem_counts_per_gb
        if counts is None:
            raise ValueError("the batch carries no plan: get_batch needs a batch_size")
        if not 0 <= batch_idx < len(counts):
            raise ValueError(f"there is no global batch {batch_idx}: the plan has {len(counts)}")
        start = sum(counts[:batch_idx])
        batch = self.slice(start, start + counts[batch_idx])
        batch.elem_counts_per_gb = [counts[batch_idx]]
        return batch


def _rebuild(
    cls: type[BatchedDataDict[Any]], views: dict[str, Any], plan: dict[str, Any]
) -> BatchedDataDict[Any]:
    batch = cls({key: columns.from_picklable_column(view) for key, view in views.items()})
    for name, value in plan.items():
        setattr(batch, name, value)
    return batch
