"""Runs of rows, or of columns, of whole tensors: what a shard of another tensor is made of."""

from __future__ import annotations

from typing import NamedTuple


class Piece(NamedTuple):
    """The rows `start` to `stop` of a tensor, or its columns where columns are cut."""

    source: str | None
    """The tensor's name; None for zeros, of which there are `stop - start`."""
    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many rows it has."""
        return self.stop - self.start


def cut(pieces: list[Piece], start: int, stop: int) -> list[Piece]:
    """Return what lies between two rows of the tensor that `pieces` make one after the other.

    Example: of `[("q", 0, 4), ("k", 0, 2)]` the rows 3 to 5 are `[("q", 3, 4), ("k", 0, 1)]`.
    """
    kept: list[Piece] = []
    offset = 0
    for source, first, last in pieces:
        begin = max(first, first + start - offset)
        end = min(last, first + stop - offset)
        if begin < end:
            kept.append(Piece(source, begin, end))
        offset += last - first
    return kept


def total_length(pieces: list[Piece]) -> int:
    """Return how many rows `pieces` have together."""
    return sum(piece.length for piece in pieces)
