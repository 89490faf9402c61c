"""First-fit bin packing in O(n log n), and splitting of bins to a required count.

The packing functions take lengths within 1..capacity and return bins of indices into them.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import cast

import numpy as np

from rl_batched_data.columns import round_up

Bins = list[list[int]]


class _Bins:
    """First-fit bins with a max-tree over their free capacity, for O(log n) lookup.

    Node `i` holds the largest free capacity below it; its children are `2i` and `2i + 1`, and the
    leaves are the bins. Unopened bins are empty leaves on the right, so a lookup finds those too.
    """

    def __init__(self, capacity: int, total: int, count: int) -> None:
        # At most one first-fit bin is half full or less: fewer than 2 * total / capacity + 1 bins.
        most = min(count, 2 * total // capacity + 1)
        self._first_leaf = 1 << (most - 1).bit_length()
        self._room = [capacity] * (2 * self._first_leaf)
        self.bins: Bins = []

    def place(self, length: int, indices: list[int]) -> None:
        """Place sequences of one length, in order, into the first bins with room."""
        room, first_leaf = self._room, self._first_leaf
        placed = 0
        while placed < len(indices):
            node = 1
            while node < first_leaf:
                node *= 2
                if room[node] < length:
                    node += 1
            number = node - first_leaf
            if number == len(self.bins):
                self.bins.append([])
            fitting = indices[placed : placed + room[node] // length]
            self.bins[number].extend(fitting)
            placed += len(fitting)
            self._shrink(node, length * len(fitting))

    def _shrink(self, node: int, tokens: int) -> None:
        """Reduce a leaf's free capacity and update its ancestors until one does not change."""
        room = self._room
        room[node] -= tokens
        node //= 2
        while node:
            left, right = room[2 * node], room[2 * node + 1]
            most = left if left > right else right
            if room[node] == most:
                return
            room[node] = most
            node //= 2


def decreasing(lengths: Sequence[int]) -> list[int]:
    """Return the indices of `lengths`, longest first; ties keep their order."""
    tokens = np.asarray(lengths, dtype=np.int64)
    return cast(list[int], np.argsort(-tokens, kind="stable").tolist())


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Return first-fit bins of the sequences, longest first.

    Opens at most 11/9 OPT + 6/9 bins (Dosa 2007, doi:10.1007/978-3-540-74450-4_1).
    """
    return _first_fit(lengths, decreasing(lengths), capacity)


def first_fit_shuffle(lengths: Sequence[int], capacity: int, *, seed: int) -> Bins:
    """Return first-fit bins of the sequences in a random order, deterministic in `seed`."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    return _first_fit(lengths, order, capacity)


def concatenative(lengths: Sequence[int], capacity: int) -> Bins:
    """Return bins of consecutive sequences (next fit): a sequence that does not fit opens a bin."""
    bins: Bins = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = capacity
        bins[-1].append(index)
        room -= length
    return bins


def modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Return first-fit-decreasing bins in which large sequences are first paired with smaller ones.

    Opens at most 71/60 OPT + 1 bins (Johnson and Garey 1985, doi:10.1016/0885-064X(85)90022-6),
    whose steps this follows. Large is more than 1/2 of the capacity, medium more than 1/3, small
    more than 1/6.
    """
    order = decreasing(lengths)
    num_large = bisect_left(order, True, key=lambda i: 2 * lengths[i] <= capacity)
    if num_large == 0:
        return _first_fit(lengths, order, capacity)
    large = order[:num_large]
    rest = _Sorted(lengths, order[num_large:])
    bins: Bins = [[i] for i in large]
    room = [capacity - lengths[i] for i in large]

    def put(number: int, index: int) -> None:
        bins[number].append(index)
        room[number] -= lengths[index]

    # Bins descend by their large sequence: the room for a medium one grows.
    for number in range(len(bins)):
        medium = rest.take_largest(at_most=room[number], above=capacity / 3)
        if medium is not None:
            put(number, medium)
    # Where no medium one fits, two small ones: the smallest, and the largest beside it.
    without_medium = [number for number in reversed(range(len(bins))) if len(bins[number]) == 1]
    for number in without_medium:
        pair = rest.smallest_two(above=capacity / 6, at_most=capacity / 3)
        if pair and lengths[pair[0]] + lengths[pair[1]] <= room[number]:
            rest.take(pair[0])
            put(number, pair[0])
            largest = rest.take_largest(at_most=min(room[number], capacity / 3))
            assert largest is not None, "the second smallest fits beside the smallest"
            put(number, largest)
    for number in range(len(bins)):
        while (index := rest.take_largest(at_most=room[number])) is not None:
            put(number, index)
    return bins + _first_fit(lengths, rest.left(), capacity)


class _Sorted:
    """Sequences sorted by length; takes the longest one below a limit in O(log n)."""

    def __init__(self, lengths: Sequence[int], descending: list[int]) -> None:
        self._indices = descending[::-1]
        self._lengths = list(map(lengths.__getitem__, self._indices))
        self._position = dict(zip(self._indices, range(len(self._indices)), strict=True))
        # Union-find links to the nearest remaining position; `_below` is shifted by one, 0 is none.
        self._below = list(range(len(self._indices) + 1))
        self._above = list(range(len(self._indices) + 1))

    def take_largest(self, *, at_most: float, above: float = 0) -> int | None:
        """Remove and return the longest sequence within the limits, or None."""
        position = _follow(self._below, bisect_right(self._lengths, at_most)) - 1
        if position < 0 or self._lengths[position] <= above:
            return None
        index = self._indices[position]
        self.take(index)
        return index

    def smallest_two(self, *, above: float, at_most: float) -> list[int] | None:
        """Return the two shortest sequences within the limits, or None if there are fewer."""
        first = _follow(self._above, bisect_right(self._lengths, above))
        if first >= len(self._indices):
            return None
        second = _follow(self._above, first + 1)
        if second >= len(self._indices) or self._lengths[second] > at_most:
            return None
        return [self._indices[first], self._indices[second]]

    def take(self, index: int) -> None:
        """Remove a sequence."""
        position = self._position.pop(index)
        self._below[position + 1] = position
        self._above[position] = position + 1

    def left(self) -> list[int]:
        """Return the remaining sequences, longest first."""
        return [index for index in reversed(self._indices) if index in self._position]


def _follow(links: list[int], start: int) -> int:
    """Return the root of `start`, with path compression."""
    end = start
    while links[end] != end:
        end = links[end]
    while links[start] != end:
        links[start], start = end, links[start]
    return end


def _first_fit(lengths: Sequence[int], order: list[int], capacity: int) -> Bins:
    if not order:
        return []
    packed = _Bins(capacity, sum(map(lengths.__getitem__, order)), len(order))
    for length, run in groupby(order, key=lengths.__getitem__):
        packed.place(length, list(run))
    return packed.bins


def wanted_bins(natural: int, *, min_bin_count: int, bin_count_multiple: int) -> int:
    """Return `natural` raised to the minimum and rounded up to the multiple."""
    return round_up(max(natural, min_bin_count), bin_count_multiple)


def split_to_count(bins: Bins, lengths: Sequence[int], count: int, *, allow_empty: bool) -> Bins:
    """Return at least `count` bins, by halving the fullest bin that holds several sequences.

    Raises:
        ValueError: There are fewer sequences than `count`, and `allow_empty` is False.
    """
    if len(bins) >= count and all(bins):
        return bins
    num_sequences = sum(len(content) for content in bins)
    if num_sequences < count and not allow_empty:
        raise ValueError(f"{num_sequences} sequences cannot fill {count} bins")
    bins = list(bins)
    missing = max(0, count - max(num_sequences, len(bins)))
    fullest = [
        (-sum(lengths[i] for i in content), number)
        for number, content in enumerate(bins)
        if len(content) > 1
    ]
    heapq.heapify(fullest)
    while len(bins) < count - missing:
        number = heapq.heappop(fullest)[1]
        for place, half in zip((number, len(bins)), _halves(bins[number], lengths), strict=True):
            bins[place : place + 1] = [half]
            if len(half) > 1:
                heapq.heappush(fullest, (-sum(lengths[i] for i in half), place))
    return bins + [[] for _ in range(missing)]


def _halves(content: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return two bins of similar length: each sequence, longest first, goes to the emptier one."""
    halves: tuple[list[int], list[int]] = ([], [])
    sums = [0, 0]
    for index in sorted(content, key=lengths.__getitem__, reverse=True):
        emptier = 0 if sums[0] <= sums[1] else 1
        halves[emptier].append(index)
        sums[emptier] += lengths[index]
    return halves
