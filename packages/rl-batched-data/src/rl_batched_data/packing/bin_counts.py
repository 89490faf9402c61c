"""Raise the number of bins to what a layout asks for, by splitting bins."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rl_batched_data.padding import round_up


def wanted_bins(natural: int, *, min_bin_count: int, bin_count_multiple: int) -> int:
    """Return the number of bins that `natural` is to be raised to."""
    return round_up(max(natural, min_bin_count), bin_count_multiple)


def split_to_count(
    bins: list[list[int]], lengths: Sequence[int], count: int, *, allow_empty: bool
) -> list[list[int]]:
    """Return at least `count` bins, made by halving the fullest that holds two sequences.

    Raises:
        ValueError: There are fewer sequences than `count`, and empty bins are not allowed.
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
    """Return two bins of about equal length: the longest sequence goes to the emptier one."""
    halves: tuple[list[int], list[int]] = ([], [])
    sums = [0, 0]
    for index in sorted(content, key=lengths.__getitem__, reverse=True):
        emptier = 0 if sums[0] <= sums[1] else 1
        halves[emptier].append(index)
        sums[emptier] += lengths[index]
    return halves
