"""A mapping whose values share their first axis, and what can be done to all of them at once."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from rl_batched_data import columns
from rl_batched_data.columns import Column
from rl_batched_data.gathering import gather_columns
from rl_batched_data.packed_tensor import PackedTensor


class RowDict(UserDict[str, Any]):
    """A mapping of names to tensors, lists and `PackedTensor`s with one entry per row."""

    def __setitem__(self, key: str, item: Any) -> None:
        if not isinstance(item, torch.Tensor | list | PackedTensor):
            raise TypeError(
                f"{key!r} is a {type(item).__name__}, expected a tensor, a list or a PackedTensor"
            )
        super().__setitem__(key, item)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowDict):
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
        return _rebuild, (type(self), views, self._own_attributes())

    def _own_attributes(self) -> dict[str, Any]:
        """Return what a subclass keeps beside the entries, for pickling."""
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

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """Return a copy of the rows at `indices`, in that order; an index may come repeatedly.

        Raises:
            ValueError: An index is not within the rows.
        """
        index = torch.as_tensor(indices, device="cpu").to(torch.int64)
        outside = index[(index < 0) | (index >= self.size)]
        if len(outside):
            raise ValueError(f"index {int(outside[0])} is not within the {self.size} rows")
        return type(self)(self._map(lambda column: columns.select_rows(column, index)))

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Return every row `num_repeats` times in a row; what lists hold is copied deeply."""
        return type(self)(self._map(lambda column: columns.repeat_rows(column, num_repeats)))

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

    def all_gather(
        self,
        group: dist.ProcessGroup | None = None,
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> Self:
        """Return the rows of all ranks of `group`, in rank order, on every rank.

        Ranks may differ in their number of rows and in widths, see `from_batches`.

        Args:
            group: The ranks that take part; the default group when None. Tensors lie on a device
                that its backend can send from.
            pad_value_dict: The value to pad with per key; 0 where it names none.
        """
        parts = gather_columns(self.data, group)
        return type(self).from_batches(parts, pad_value_dict)

    def _map(self, operation: Callable[[Column], Column]) -> dict[str, Column]:
        self.check_sizes()
        return {key: operation(column) for key, column in self.data.items()}


def _rebuild(cls: type[RowDict], views: dict[str, Any], attributes: dict[str, Any]) -> RowDict:
    batch = cls({key: columns.from_picklable_column(view) for key, view in views.items()})
    for name, value in attributes.items():
        setattr(batch, name, value)
    return batch
