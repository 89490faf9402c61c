"""Axis-aligned boxes of a tensor: what one rank holds of it, or wants."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Box(NamedTuple):
    """A rectangular slice of a tensor, in the coordinates of the full tensor.

    Example: rows 2 and 3 of a matrix with 5 columns are `Box((2, 0), (2, 5))`.
    """

    offset: tuple[int, ...]
    """Of its first element, per dim."""
    shape: tuple[int, ...]
    """Its size, per dim; with a 0 it is empty."""

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        ends = (f"{start}:{start + size}" for start, size in zip(*self, strict=True))
        return f"[{', '.join(ends)}]"

    def contains(self, other: Box) -> bool:
        """Return whether every element of `other` is in this box."""
        return all(
            start <= first and first + length <= start + size
            for start, size, first, length in zip(*self, *other, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """Return the elements that both have; None if there are none."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = tuple(min(a + m, b + n) for a, m, b, n in zip(*self, *other, strict=True))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    def relative_to(self, outer: Box) -> Box:
        """Return this box in the coordinates of `outer`, which contains it."""
        offset = (mine - its for mine, its in zip(self.offset, outer.offset, strict=True))
        return Box(tuple(offset), self.shape)

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this slice of a tensor as a view."""
        for dim, (start, size) in enumerate(zip(*self, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor
