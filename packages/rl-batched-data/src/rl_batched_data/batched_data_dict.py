"""The batch type of every package: a mapping of columns that share their rows, dim 0."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, overload

import torch
from typing_extensions import TypeVar

from rl_batched_data import columns
from rl_batched_data.columns import Column, PackedTensor, check_positive
from rl_batched_data.packing.packed_sequences import PackedSequences
from rl_batched_data.sharding import (
    DynamicBatching,
    DynamicBatchingArgs,
    SequencePacking,
    SequencePackingArgs,
    ShardPlan,
    balanced_bounds,
    parse_options,
    plan_batch,
)

# The default makes a bare `BatchedDataDict` a batch of any keys.
SpecT = TypeVar("SpecT", default=Any)

_PLAN_ATTRIBUTES = (
    "elem_counts_per_gb",
    "micro_batch_indices",
    "micro_batch_lengths",
    "micro_batch_options",
)


class BatchedDataDict(UserDict[str, Any], Generic[SpecT]):
    """A mapping of names to tensors, lists and `PackedTensor`s, each with one entry per row.

    The type parameter names the TypedDict of the keys: `BatchedDataDict[GenerationDatumSpec]`. With
    none, a batch may have any keys.

    An unpickled batch may share its memory with other processes: treat it as read-only, and call
    `writable()` for a copy.

    Example, two rows:
        batch = BatchedDataDict({"input_ids": torch.tensor([[1, 2], [3, 0]]), "text": ["a", "b"]})
        batch.size           -> 2
        batch.slice(1, 2)    -> SlicedDataDict(size=1, input_ids=int64[1, 2], text=list[1])
    """

    def __setitem__(self, key: str, item: object) -> None:
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

    def __reduce__(self) -> tuple[Callable[..., BatchedDataDict], tuple[object, ...]]:
        views = {key: columns.to_picklable(column) for key, column in self.data.items()}
        return _rebuild, (type(self), views, self._own_attributes())

    def _own_attributes(self) -> dict[str, object]:
        """Return the attributes of a subclass that are pickled beside the entries."""
        return {}

    @property
    def size(self) -> int:
        """The number of rows; 0 if the batch is empty."""
        return next((columns.num_rows(column) for column in self.data.values()), 0)

    def check_sizes(self) -> None:
        """Raise a `ValueError` that names keys and sizes if the numbers of rows differ."""
        sizes = {key: columns.num_rows(column) for key, column in self.data.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"entries of a batch differ in their number of rows: {sizes}")

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Column]],
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> Self:
        """Return the rows of all `batches`, in order; an empty batch if there are none.

        Tensors are right-padded along every dim but the first to the largest size.

        Args:
            batches: Batches, or plain dicts, with the same keys and dtypes.
            pad_value_dict: Padding value per key; default 0.

        Raises:
            ValueError: Keys, types or dtypes differ; names the key.
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

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """Return a copy of the rows at `indices`, in that order; indices may repeat.

        Raises:
            ValueError: An index is out of range.
        """
        index = torch.as_tensor(indices, device="cpu").to(torch.int64)
        outside = index[(index < 0) | (index >= self.size)]
        if len(outside):
            raise ValueError(f"index {int(outside[0])} is not within the {self.size} rows")
        return type(self)(self._map(lambda column: columns.select_rows(column, index)))

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Return every row `num_repeats` times, consecutively; list elements are deep-copied."""
        return type(self)(self._map(lambda column: columns.repeat_rows(column, num_repeats)))

    def reorder_data(self, order: Sequence[int]) -> Self:
        """Move row `j` to position `order[j]`, in place, and return self.

        With the `order` that `shard_by_batch_size` returned, this restores the original order. A
        micro-batch plan is dropped.

        Raises:
            ValueError: `order` is not a permutation of the rows.
        """
        places = torch.as_tensor(order, dtype=torch.int64)
        if not _is_permutation(places, self.size):
            raise ValueError(
                f"order, of {len(order)} numbers, is not a permutation of the {self.size} rows"
            )
        inverse = torch.empty(len(order), dtype=torch.int64)
        inverse[places] = torch.arange(len(order))
        self.data.update(self._map(lambda column: columns.select_rows(column, inverse)))
        return self

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Truncate every tensor with more than `dim` dims to `truncated_len` along `dim`, in place.

        Raises:
            ValueError: `dim` is the batch dim.
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
        """Return a copy that shares no memory and may be modified in place."""
        copied = self.copy()
        copied.data.update(self._map(columns.clone))
        return copied

    def get_dict(self) -> dict[str, Any]:
        """Return a plain dict of the same values."""
        return dict(self.data)

    def slice(self, start: int, end: int) -> SlicedDataDict[SpecT]:
        """Return rows `[start, end)` without copying tensors.

        Raises:
            ValueError: Not `0 <= start <= end <= size`.
        """
        if not 0 <= start <= end <= self.size:
            raise ValueError(f"rows {start}..{end} are not within the {self.size} rows")
        return SlicedDataDict(self._map(lambda column: columns.slice_rows(column, start, end)))

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict[SpecT]:
        """Return a copy of chunk `rank` of `chunks`, whose sizes differ by at most one row.

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

    def get_batch(self, batch_idx: int, batch_size: int) -> SlicedDataDict[SpecT]:
        """Return global batch `batch_idx` without copying; the last one may be short.

        Args:
            batch_idx: Index of the global batch, from 0.
            batch_size: Rows per global batch.

        Raises:
            ValueError: There is no such global batch.
        """
        check_positive("batch_size", batch_size)
        start = batch_idx * batch_size
        # An empty batch has one global batch, which is empty.
        if not 0 <= start < max(self.size, 1):
            raise ValueError(
                f"there is no global batch {batch_idx} of {batch_size} rows in {self.size} rows"
            )
        return self.slice(start, min(start + batch_size, self.size))

    def make_microbatch_iterator(self, micro_batch_size: int) -> Iterator[SlicedDataDict[SpecT]]:
        """Yield `micro_batch_size` rows at a time without copying; the last ones may be fewer.

        Raises:
            ValueError: `micro_batch_size` is not positive.
        """
        check_positive("micro_batch_size", micro_batch_size)
        starts = range(0, self.size, micro_batch_size)
        return (self.slice(low, min(low + micro_batch_size, self.size)) for low in starts)

    # A call with neither argument matches both overloads; pyright takes the first.
    @overload
    def shard_by_batch_size(  # pyright: ignore[reportOverlappingOverload]
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: None = None,
        sequence_packing_args: None = None,
        *,
        rows_per_group: int = 1,
    ) -> list[SlicedDataDict[SpecT]]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
        *,
        rows_per_group: int = 1,
    ) -> tuple[list[SlicedDataDict[SpecT]], list[int]]: ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
        *,
        rows_per_group: int = 1,
    ) -> list[SlicedDataDict[SpecT]] | tuple[list[SlicedDataDict[SpecT]], list[int]]:
        """Shard every global batch, and return each shard's rows, global batch after global batch.

        By default, a shard takes consecutive rows. `dynamic_batching_args` and
        `sequence_packing_args`, which exclude each other, reorder the rows; the new order is then
        returned too, and `reorder_data` undoes it.

        Example, rows [0..7], shards=2, batch_size=4:
            [0, 1, 4, 5] and [2, 3, 6, 7]

        Args:
            shards: Number of shards, one per data-parallel rank.
            batch_size: Rows per global batch; all rows when None.
            allow_uneven_shards: Accept any number of rows. Shards of a global batch then differ by
                at most one row, and may be empty: 9 rows over 8 shards are 2,1,1,1,1,1,1,1.
                Dynamic batching and packing always accept any number.
            dynamic_batching_args: Plan micro-batches under a budget of padded tokens, see
                `plan_dynamic_shards`.
            sequence_packing_args: Plan micro-batches of packed sequences, see `plan_packed_shards`.
            rows_per_group: Consecutive rows that stay in one shard and one micro-batch.

        Returns:
            The shards; with dynamic batching or packing, the shards and their row indices, shard
            after shard.

        Raises:
            ValueError: Entries differ in size, a key is missing, or a number is out of range or
                does not divide; raised before any tensor is touched.
        """
        plans = self.plan_by_batch_size(
            shards,
            batch_size,
            allow_uneven_shards,
            dynamic_batching_args,
            sequence_packing_args,
            rows_per_group=rows_per_group,
        )
        parts = [self.apply_plan(plan) for plan in plans]
        if dynamic_batching_args is None and sequence_packing_args is None:
            return parts
        return parts, [row for plan in plans for row in plan.rows]

    def plan_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
        *,
        rows_per_group: int = 1,
    ) -> list[ShardPlan]:
        """Return the plan of each shard that `shard_by_batch_size` would return.

        Who holds the batch can apply the plan of a shard by `apply_plan`, in another process too.

        Args:
            shards: See `shard_by_batch_size`, as for the other arguments.
            batch_size: Rows per global batch; all rows when None.
            allow_uneven_shards: Accept any number of rows.
            dynamic_batching_args: Plan micro-batches under a budget of padded tokens.
            sequence_packing_args: Plan micro-batches of packed sequences.
            rows_per_group: Consecutive rows that stay in one shard and one micro-batch.

        Raises:
            ValueError: See `shard_by_batch_size`.
        """
        self.check_sizes()
        options = parse_options(
            dynamic_batching_args=dynamic_batching_args,
            sequence_packing_args=sequence_packing_args,
        )
        return plan_batch(
            self.data,
            self.size,
            shards=shards,
            batch_size=batch_size,
            allow_uneven_shards=allow_uneven_shards,
            options=options,
            rows_per_group=rows_per_group,
        )

    def apply_plan(self, plan: ShardPlan) -> SlicedDataDict[SpecT]:
        """Return the rows of a plan, in its order and with its micro-batches.

        Consecutive rows share the memory of the batch, others are copied.
        """
        start = plan.rows[0] if plan.rows else 0
        end = start + len(plan.rows)
        if plan.rows == list(range(start, end)):
            shard = self.slice(start, end)
        else:
            index = torch.tensor(plan.rows, dtype=torch.int64)
            shard = SlicedDataDict[SpecT](self._map(lambda c: columns.select_rows(c, index)))
        shard.elem_counts_per_gb = plan.elem_counts_per_gb
        shard.micro_batch_indices = plan.micro_batch_indices
        shard.micro_batch_lengths = plan.micro_batch_lengths
        shard.micro_batch_options = plan.micro_batch_options
        return shard

    def _map(self, operation: Callable[[Column], Column]) -> dict[str, Column]:
        self.check_sizes()
        return {key: operation(column) for key, column in self.data.items()}


class SlicedDataDict(BatchedDataDict[SpecT]):
    """Rows of a batch with their division into global batches and micro-batches.

    Without a plan from `shard_by_batch_size`, the attributes are None. Pickling keeps them.
    """

    elem_counts_per_gb: list[int] | None = None
    """Number of rows in each global batch."""
    micro_batch_indices: list[list[list[int]]] | None = None
    """Per global batch, `[start, end)` of each micro-batch, relative to that global batch."""
    micro_batch_lengths: list[list[int]] | None = None
    """Per global batch, the width (dynamic) or the tokens (packed) of each micro-batch."""
    micro_batch_options: DynamicBatching | SequencePacking | None = None
    """The options that the micro-batches were planned with."""

    def _own_attributes(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in _PLAN_ATTRIBUTES}

    def reorder_data(self, order: Sequence[int]) -> Self:
        """Move row `j` to position `order[j]`, in place, drop the plan, and return self."""
        super().reorder_data(order)
        for name in _PLAN_ATTRIBUTES:
            setattr(self, name, None)
        return self

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict[SpecT]:
        """Return global batch `batch_idx` with its part of the plan, without copying.

        Args:
            batch_idx: Index of the global batch, from 0.
            batch_size: Rows per global batch if no micro-batches are planned; None follows the
                plan.

        Raises:
            ValueError: There is no such global batch, or neither a plan nor a `batch_size`.
        """
        if batch_size is not None and self.micro_batch_indices is None:
            return super().get_batch(batch_idx, batch_size)
        counts = self.elem_counts_per_gb
        if counts is None:
            raise ValueError("the batch carries no plan: get_batch needs a batch_size")
        if not 0 <= batch_idx < len(counts):
            raise ValueError(f"there is no global batch {batch_idx}: the plan has {len(counts)}")
        start = sum(counts[:batch_idx])
        batch = self.slice(start, start + counts[batch_idx])
        batch.elem_counts_per_gb = [counts[batch_idx]]
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
            batch.micro_batch_options = self.micro_batch_options
        return batch

    def make_microbatch_iterator_with_dynamic_shapes(self) -> Iterator[SlicedDataDict[SpecT]]:
        """Yield the planned micro-batches, each truncated or zero-padded to its planned width.

        This resizes the entries that have the width of `input_key`. A micro-batch has no rows only
        if the shard has fewer rows than micro-batches.

        Raises:
            ValueError: The batch was not sharded with `dynamic_batching_args`.
        """
        options = self.micro_batch_options
        if not isinstance(options, DynamicBatching):
            raise ValueError("the batch carries no plan of dynamic micro-batches")
        return (
            micro_batch.fit_width(options.input_key, length)
            for micro_batch, length in self._planned()
        )

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict[SpecT]]:
        """Yield the rows of each planned bin; their `packed_sequences()` is the packed layout.

        Raises:
            ValueError: The batch was not sharded with `sequence_packing_args`.
        """
        if not isinstance(self.micro_batch_options, SequencePacking):
            raise ValueError("the batch carries no plan of packed micro-batches")
        return (micro_batch for micro_batch, _ in self._planned())

    def packed_sequences(self) -> PackedSequences:
        """Return the layout of this packed micro-batch, with the planned padding.

        Raises:
            ValueError: The batch is not one packed micro-batch.
        """
        options, lengths = self.micro_batch_options, self.micro_batch_lengths
        if not isinstance(options, SequencePacking) or lengths is None or len(lengths[0]) != 1:
            raise ValueError("the batch is not one packed micro-batch")
        return PackedSequences.of(
            self[options.input_lengths_key],
            self[options.input_key].shape[1],
            pad_multiple=options.sequence_length_pad_multiple,
            total_length=lengths[0][0],
        )

    def fit_width(self, input_key: str, width: int) -> SlicedDataDict[SpecT]:
        """Truncate or zero-pad to `width` the entries that are as wide as `input_key`."""
        given = self[input_key].shape[1]
        return SlicedDataDict(
            self._map(lambda column: columns.fit_width(column, given=given, width=width))
        )

    def _planned(self) -> Iterator[tuple[SlicedDataDict[SpecT], int]]:
        assert self.elem_counts_per_gb is not None, "a plan counts its rows"
        for batch_idx in range(len(self.elem_counts_per_gb)):
            batch = self.get_batch(batch_idx)
            assert batch.micro_batch_indices is not None, "a plan has micro-batches"
            assert batch.micro_batch_lengths is not None, "a plan has micro-batches"
            for (start, end), length in zip(
                batch.micro_batch_indices[0], batch.micro_batch_lengths[0], strict=True
            ):
                micro_batch = batch.slice(start, end)
                micro_batch.elem_counts_per_gb = [end - start]
                micro_batch.micro_batch_indices = [[[0, end - start]]]
                micro_batch.micro_batch_lengths = [[length]]
                micro_batch.micro_batch_options = self.micro_batch_options
                yield micro_batch, length


def _rebuild(
    cls: type[BatchedDataDict],
    views: Mapping[str, Column | columns.TensorView],
    attributes: Mapping[str, object],
) -> BatchedDataDict:
    batch = cls({key: columns.from_picklable(view) for key, view in views.items()})
    for name, value in attributes.items():
        setattr(batch, name, value)
    return batch


def _is_permutation(places: torch.Tensor, size: int) -> bool:
    """Return whether `[rows]` places are 0, 1, ..., `size - 1` in any order."""
    if len(places) != size or bool(((places < 0) | (places >= size)).any()):
        return False
    is_taken = torch.zeros(size, dtype=torch.bool)
    is_taken[places] = True
    return bool(is_taken.all())
