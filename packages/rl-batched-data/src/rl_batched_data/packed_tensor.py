"""Ragged tensors, one per row of a batch: the images of a prompt, say."""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from rl_batched_data.tensor_pickling import TensorOrView, from_picklable, to_picklable

_Reduced = tuple[Callable[[list[TensorOrView], int], "PackedTensor"], tuple[Any, ...]]


class PackedTensor:
    """One tensor, or none, per row, to be concatenated along `dim_to_pack` when a model reads them.

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

    def __reduce__(self) -> _Reduced:
        rows = [None if row is None else to_picklable(row) for row in self.tensors]
        return _rebuild, (rows, self.dim_to_pack)

    def as_tensor(self, device: torch.device | str | None = None) -> torch.Tensor | None:
        """Return all rows concatenated along `dim_to_pack`, or None when no row has a tensor.

        Args:
            device: Where the result is put; the rows stay where they are.
        """
        rows = [row.to(device) if device is not None else row for row in self._present()]
        return torch.cat(rows, dim=self.dim_to_pack) if rows else None

    def slice(self, indices: Sequence[int] | torch.Tensor) -> PackedTensor:
        """Return the rows at `indices`, in that order, sharing their memory."""
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
            ValueError: There is no part, or the parts differ in `dim_to_pack`.
        """
        dims = {part.dim_to_pack for part in parts}
        if len(dims) != 1:
            raise ValueError(f"parts must agree in dim_to_pack, got {sorted(dims)}")
        return cls([row for part in parts for row in part.tensors], dims.pop())

    @classmethod
    def empty_like(cls, other: PackedTensor) -> PackedTensor:
        """Return as many rows as `other` has, none of which has a tensor."""
        return cls([None] * len(other), other.dim_to_pack)

    def _present(self) -> list[torch.Tensor]:
        return [row for row in self.tensors if row is not None]


def _rebuild(rows: list[TensorOrView], dim_to_pack: int) -> PackedTensor:
    return PackedTensor([None if row is None else from_picklable(row) for row in rows], dim_to_pack)


def _equal_rows(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left, right)
