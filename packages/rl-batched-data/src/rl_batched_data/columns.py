"""The columns of a batch (tensors, lists, `PackedTensor`s): rows, sizes, padding and pickling.

Tensors are pickled as numpy views, whose bytes pickle protocol 5 (PEP 574) moves out of band: an
object store writes them once, and every reader on the machine maps the same memory. A pickled
tensor would copy its full storage instead.
"""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

# numpy has no bfloat16 or float8: the bytes are sent as integers of the same width.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorView:
    """The memory of a tensor as a numpy array of integers, and its dtype."""

    array: npt.NDArray[np.integer]
    dtype: torch.dtype


ValueT = TypeVar("ValueT")


def to_picklable(value: ValueT) -> ValueT | TensorView:
    """Return a numpy view of the memory of a tensor, or `value` if numpy cannot view it.

    Only dense CPU tensors without a gradient have a view; a non-contiguous one is copied.
    """
    if (
        not isinstance(value, torch.Tensor)
        or type(value) is not torch.Tensor
        or value.device.type != "cpu"
        or value.layout is not torch.strided
        or value.requires_grad
        or value.is_complex()
        or value.is_quantized
        or value.element_size() not in _CARRIERS
    ):
        return value
    carrier = _CARRIERS[value.element_size()]
    return TensorView(value.contiguous().view(carrier).numpy(), value.dtype)


def from_picklable(value: ValueT | TensorView) -> ValueT | torch.Tensor:
    """Return the value that `to_picklable` was given, backed by the unpickled memory."""
    if not isinstance(value, TensorView):
        return value
    if not value.array.flags.writeable:
        return _from_read_only(value.array).view(value.dtype)
    return torch.from_numpy(value.array).view(value.dtype)


def _from_read_only(array: npt.NDArray[np.integer]) -> torch.Tensor:
    if array.size == 0:
        return torch.from_numpy(np.empty_like(array))
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns; an unpickled batch is documented as read-only.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


# One entry per row.
_Rows: TypeAlias = list[torch.Tensor | TensorView | None]


class PackedTensor:
    """One tensor, or None, per row; the model reads them concatenated along `dim_to_pack`.

    Example, a batch of three rows with two, no and one image of 3 features:
        packed = PackedTensor([torch.ones(2, 3), None, torch.zeros(1, 3)], dim_to_pack=0)
        len(packed)         -> 3
        packed.as_tensor()  -> float32 [3, 3]
    """

    def __init__(
        self, tensors: torch.Tensor | Sequence[torch.Tensor | None], dim_to_pack: int
    ) -> None:
        self.tensors: list[torch.Tensor | None] = (
            [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        )
        self.dim_to_pack = dim_to_pack

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        shapes = [None if row is None else list(row.shape) for row in self.tensors]
        return f"PackedTensor({shapes}, dim_to_pack={self.dim_to_pack})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedTensor):
            return NotImplemented
        return (
            self.dim_to_pack == other.dim_to_pack
            and len(self) == len(other)
            and all(_equal_rows(a, b) for a, b in zip(self.tensors, other.tensors, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Callable[[_Rows, int], PackedTensor], tuple[_Rows, int]]:
        rows: _Rows = [to_picklable(row) for row in self.tensors]
        return _rebuild, (rows, self.dim_to_pack)

    def as_tensor(self, device: torch.device | str | None = None) -> torch.Tensor | None:
        """Return all rows concatenated along `dim_to_pack`, or None if no row has a tensor.

        Args:
            device: Device of the result; the rows themselves are not moved.
        """
        rows = [row.to(device) if device is not None else row for row in self._present()]
        return torch.cat(rows, dim=self.dim_to_pack) if rows else None

    def slice(self, indices: Sequence[int] | torch.Tensor) -> PackedTensor:
        """Return the rows at `indices`, in that order, without copying tensors."""
        if isinstance(indices, torch.Tensor):
            indices = cast(list[int], indices.tolist())
        return PackedTensor([self.tensors[i] for i in indices], self.dim_to_pack)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedTensor:
        """Move every row to `device` and return self."""
        self.tensors = [
            None if row is None else row.to(device, non_blocking=non_blocking)
            for row in self.tensors
        ]
        return self

    def clone(self) -> PackedTensor:
        """Return a copy that shares no memory."""
        rows = [None if row is None else row.clone() for row in self.tensors]
        return PackedTensor(rows, self.dim_to_pack)

    @classmethod
    def concat(cls, parts: Sequence[PackedTensor]) -> PackedTensor:
        """Return the rows of all `parts`, in order.

        Raises:
            ValueError: `parts` is empty, or its members differ in `dim_to_pack`.
        """
        dims = {part.dim_to_pack for part in parts}
        if len(dims) != 1:
            raise ValueError(f"parts must agree in dim_to_pack, got {sorted(dims)}")
        return cls([row for part in parts for row in part.tensors], dims.pop())

    @classmethod
    def empty_like(cls, other: PackedTensor) -> PackedTensor:
        """Return `len(other)` rows without tensors."""
        return cls([None] * len(other), other.dim_to_pack)

    def _present(self) -> list[torch.Tensor]:
        return [row for row in self.tensors if row is not None]


def _rebuild(rows: _Rows, dim_to_pack: int) -> PackedTensor:
    return PackedTensor([from_picklable(row) for row in rows], dim_to_pack)


def _equal_rows(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left, right)


# What a list holds is the caller's own.
Column: TypeAlias = torch.Tensor | list[Any] | PackedTensor


def num_rows(column: Column) -> int:
    """Return the size of dim 0; a 0-dim tensor has no rows."""
    if isinstance(column, torch.Tensor):
        return column.shape[0] if column.ndim else 0
    return len(column)


def slice_rows(column: Column, start: int, end: int) -> Column:
    """Return rows `start` to `end` without copying tensors."""
    if isinstance(column, PackedTensor):
        return column.slice(range(start, end))
    return column[start:end]


def select_rows(column: Column, index: torch.Tensor) -> Column:
    """Return a copy of the rows at `index`, `[rows]` int64 on the CPU."""
    if isinstance(column, torch.Tensor):
        return column.index_select(0, index.to(column.device))
    if isinstance(column, PackedTensor):
        return column.slice(index)
    return [column[i] for i in cast(list[int], index.tolist())]


def fit_width(column: Column, *, given: int, width: int) -> Column:
    """Truncate or zero-pad to `width` along dim 1 a tensor of size `given` there."""
    if not isinstance(column, torch.Tensor) or column.ndim < 2 or column.shape[1] != given:
        return column
    return pad_right(column.narrow(1, 0, min(width, given)), width)


def repeat_rows(column: Column, num_repeats: int) -> Column:
    """Return every row `num_repeats` times, consecutively; list elements are deep-copied."""
    if isinstance(column, torch.Tensor):
        return column.repeat_interleave(num_repeats, 0)
    if isinstance(column, PackedTensor):
        rows = [i for i in range(len(column)) for _ in range(num_repeats)]
        return column.slice(rows)
    return [copy.deepcopy(row) for row in column for _ in range(num_repeats)]


def clone(column: Column) -> Column:
    """Return a deep copy."""
    if isinstance(column, list):
        return copy.deepcopy(column)
    return column.clone()


def equal(left: Column, right: Column) -> bool:
    """Return whether two columns have equal values and dtypes."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def describe(column: Column) -> str:
    """Return dtype and shape, such as `int64[4, 8]`."""
    if isinstance(column, torch.Tensor):
        return f"{str(column.dtype).removeprefix('torch.')}{list(column.shape)}"
    return f"{type(column).__name__}[{len(column)}]"


def concat(key: str, columns: Sequence[Column], pad_value: float) -> Column:
    """Return the rows of all columns; tensors are right-padded to the widest.

    Raises:
        ValueError: Columns differ in kind, dtype, device or number of axes; names `key`.
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


def check_positive(name: str, value: int) -> None:
    """Raise a `ValueError` that names `name` and `value` if `value` is less than 1."""
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def pad_right(tensor: torch.Tensor, length: int, *, dim: int = 1, value: float = 0) -> torch.Tensor:
    """Return `tensor` padded with `value` to `length` along `dim`; itself if it has that length.

    Raises:
        ValueError: `tensor` is longer than `length` along `dim`.
    """
    missing = length - tensor.shape[dim]
    if missing < 0:
        raise ValueError(f"dim {dim} has size {tensor.shape[dim]}, longer than length={length}")
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, value)], dim=dim)


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return `tensor` on `device`, without waiting for it where the tensor is on the CPU.

    `Tensor.to` waits until a GPU has done all that was queued before the copy. A copy from pageable
    memory need not: CUDA stages the bytes before the call returns. One to the CPU has to wait.
    """
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def verify_right_padding(data: Mapping[str, object]) -> None:
    """Raise if `input_lengths` do not fit `input_ids`, or an `attention_mask` says otherwise.

    Padding is what follows the length of a row, whatever its tokens are: a row may start with the
    padding token, as it does if that is the tokenizer's first token of a text as well.

    Args:
        data: `input_ids` `[batch, seq]` and `input_lengths` `[batch]`, any integers; optionally
            `attention_mask` `[batch, seq]`, 1 at tokens and 0 at padding.

    Raises:
        ValueError: Names the key, the first offending row and its numbers.
    """
    input_ids, lengths = _ids_and_lengths(data)
    width = input_ids.shape[1]
    outside = (lengths < 1) | (lengths > width)
    if outside.any():
        row = _first_row(outside)
        raise ValueError(
            f"'input_lengths'[{row}]={int(lengths[row])} is not within 1..{width}, "
            f"the width of 'input_ids'"
        )
    if "attention_mask" in data:
        mask = _tensor(data, "attention_mask", num_axes=2).to(lengths.device)
        _verify_mask(mask, lengths, shape=input_ids.shape)


def _verify_mask(mask: torch.Tensor, lengths: torch.Tensor, *, shape: torch.Size) -> None:
    if mask.shape != shape:
        raise ValueError(
            f"'attention_mask' has shape {list(mask.shape)}, 'input_ids' {list(shape)}"
        )
    is_token = torch.arange(shape[1], device=lengths.device) < lengths[:, None]
    uneven = (mask.bool() != is_token).any(dim=1)
    if uneven.any():
        row = _first_row(uneven)
        raise ValueError(
            f"'attention_mask'[{row}] is not 1 at the first 'input_lengths'[{row}]="
            f"{int(lengths[row])} tokens and 0 after them: pad on the right, not on the left"
        )


def _ids_and_lengths(data: Mapping[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    input_ids = _tensor(data, "input_ids", num_axes=2)
    lengths = _tensor(data, "input_lengths", num_axes=1)
    if len(lengths) != len(input_ids):
        raise ValueError(
            f"'input_lengths' has {len(lengths)} rows, 'input_ids' has {len(input_ids)}"
        )
    return input_ids, lengths.to(input_ids.device)


def _tensor(data: Mapping[str, object], key: str, *, num_axes: int) -> torch.Tensor:
    if key not in data:
        raise ValueError(f"{key!r} is missing; the batch has {sorted(data)}")
    value = data[key]
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{key!r} is a {type(value).__name__}, expected a tensor")
    if value.ndim != num_axes:
        raise ValueError(f"{key!r} has shape {list(value.shape)}, expected {num_axes} axes")
    return value


def _first_row(mask: torch.Tensor) -> int:
    return int(mask.nonzero()[0])
