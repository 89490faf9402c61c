"""One column of a batch: what each operation on rows does to a tensor, a list or a PackedTensor."""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch

from rl_batched_data.packed_tensor import PackedTensor
from rl_batched_data.padding import pad_right
from rl_batched_data.tensor_pickling import TensorView, from_picklable, to_picklable

Column: TypeAlias = torch.Tensor | list[Any] | PackedTensor


def num_rows(column: Column) -> int:
    """Return the size of the first axis; a tensor without one has no rows."""
    if isinstance(column, torch.Tensor):
        return column.shape[0] if column.ndim else 0
    return len(column)


def slice_rows(column: Column, start: int, end: int) -> Column:
    """Return rows `start` to `end` without copying tensors."""
    if isinstance(column, PackedTensor):
        return column.slice(range(start, end))
    return column[start:end]


def select_rows(column: Column, index: torch.Tensor) -> Column:
    """Return the rows at `index`, an int64 vector on the CPU, as a copy."""
    if isinstance(column, torch.Tensor):
        return column.index_select(0, index.to(column.device))
    if isinstance(column, PackedTensor):
        return column.slice(index)
    return [column[i] for i in cast(list[int], index.tolist())]


def fit_width(column: Column, *, given: int, width: int) -> Column:
    """Return a tensor whose second axis is `given` wide cut or zero-padded to `width` there."""
    if not isinstance(column, torch.Tensor) or column.ndim < 2 or column.shape[1] != given:
        return column
    return pad_right(column.narrow(1, 0, min(width, given)), width)


def repeat_rows(column: Column, num_repeats: int) -> Column:
    """Return every row `num_repeats` times in a row; what a list holds is copied deeply."""
    if isinstance(column, torch.Tensor):
        return column.repeat_interleave(num_repeats, 0)
    if isinstance(column, PackedTensor):
        rows = [i for i in range(len(column)) for _ in range(num_repeats)]
        return column.slice(rows)
    return [copy.deepcopy(row) for row in column for _ in range(num_repeats)]


def clone(column: Column) -> Column:
    """Return a column that shares no tensor memory with `column`."""
    if isinstance(column, list):
        return copy.deepcopy(column)
    return column.clone()


def equal(left: Column, right: Column) -> bool:
    """Return whether two columns hold the same values in the same types."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def describe(column: Column) -> str:
    """Return the shape and dtype, as in `int64[4, 8]`."""
    if isinstance(column, torch.Tensor):
        return f"{str(column.dtype).removeprefix('torch.')}{list(column.shape)}"
    return f"{type(column).__name__}[{len(column)}]"


def concat(key: str, columns: Sequence[Column], pad_value: float) -> Column:
    """Return the rows of all columns, those of tensors padded on the right to the widest.

    Raises:
        ValueError: The columns differ in kind, dtype, device or number of axes; names `key`.
    """
    kinds = {type(column) for column in columns}
    if len(kinds) > 1:
        raise ValueError(f"{key!r} mixes {sorted(kind.__name__ for kind in kinds)}")
    tensors = [column for column in columns if isinstance(column, torch.Tensor)]
    if tensors:
        return _concat_tensors(key, tensors, pad_value)
    packed = [column for column in columns if isinstance(column, PackedTensor)]
    if packed:
        return PackedTensor.concat(packed)
    return [row for column in columns if isinstance(column, list) for row in column]


def to_picklable_column(column: Column) -> Any:
    """Return `column` with its tensors as numpy views."""
    if isinstance(column, torch.Tensor):
        return to_picklable(column)
    return column


def from_picklable_column(value: Any) -> Column:
    """Return the column that `to_picklable_column` was given."""
    return from_picklable(value) if isinstance(value, TensorView) else value


def _concat_tensors(key: str, tensors: list[torch.Tensor], pad_value: float) -> torch.Tensor:
    for what, values in (
        ("dtype", {str(tensor.dtype) for tensor in tensors}),
        ("device", {str(tensor.device) for tensor in tensors}),
        ("number of axes", {str(tensor.ndim) for tensor in tensors}),
    ):
        if len(values) > 1:
            raise ValueError(f"{key!r} differs in {what}: {', '.join(sorted(values))}")
    widest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    if all(list(tensor.shape[1:]) == widest for tensor in tensors):
        return torch.cat(tensors)
    total = sum(tensor.shape[0] for tensor in tensors)
    padded = tensors[0].new_full((total, *widest), pad_value)
    start = 0
    for tensor in tensors:
        inner = tuple(slice(0, size) for size in tensor.shape[1:])
        padded[(slice(start, start + tensor.shape[0]), *inner)] = tensor
        start += tensor.shape[0]
    return padded
