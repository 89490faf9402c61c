"""Accesses to the engine's parameters during a load, and which slices do not survive them.

Slices arrive in another order than the loader's, and alone: what the loader writes over them, or
computes from them once they are there, would be lost.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch


class Access(NamedTuple):
    """A view of a parameter that the loader writes or reads, in elements of its storage."""

    name: str | None
    """Of the trainer's tensor that is written; None: a constant is, or the view is read."""
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """One past its last element."""
        return self.start + sum((n - 1) * s for n, s in zip(*self[2:], strict=True)) + 1

    def view_of(self, mask: torch.Tensor, first: int) -> torch.Tensor:
        """Return its elements of a mask that begins at the element `first` of the storage."""
        return mask.as_strided(self.shape, self.strides, self.start - first)


def conflicts(accesses: Sequence[Access]) -> set[str]:
    """Return the tensors that share elements with a later access, and the tensors of those.

    Args:
        accesses: To one storage, in the order of the load; none is empty.
    """
    found: set[str] = set()
    for cluster in _clusters(accesses):
        if len(cluster) > 1 and any(each.name for each in cluster):
            found |= _conflicts(cluster)
    return found


def _clusters(accesses: Sequence[Access]) -> Iterable[list[Access]]:
    """Return accesses whose ranges from first to last element touch, each in their order."""
    order = sorted(range(len(accesses)), key=lambda index: accesses[index].start)
    members: list[int] = []
    end = 0
    for index in order:
        if members and accesses[index].start >= end:
            yield [accesses[each] for each in sorted(members)]
            members = []
        members.append(index)
        end = max(end, accesses[index].end) if len(members) > 1 else accesses[index].end
    if members:
        yield [accesses[each] for each in sorted(members)]


def _conflicts(cluster: list[Access]) -> set[str]:
    first = min(each.start for each in cluster)
    written = torch.zeros(max(each.end for each in cluster) - first, dtype=torch.bool)
    found: set[str] = set()
    for index, later in enumerate(cluster):
        if later.view_of(written, first).any():
            earlier = {e.name for e in cluster[:index] if e.name and _overlap(e, later)}
            found |= earlier | ({later.name} if later.name else set())
        if later.name:
            later.view_of(written, first).fill_(True)
    return found


def _overlap(one: Access, other: Access) -> bool:
    first, end = max(one.start, other.start), min(one.end, other.end)
    if first >= end:
        return False
    first, end = min(one.start, other.start), max(one.end, other.end)
    mask = torch.zeros(end - first, dtype=torch.bool)
    one.view_of(mask, first).fill_(True)
    return bool(other.view_of(mask, first).any())
