"""Packers assign sequences to bins of limited capacity; `get_packer` returns one by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rl_batched_data.columns import check_positive
from rl_batched_data.packing.cost import SequenceCost, cost_balanced
from rl_batched_data.packing.first_fit import (
    Bins,
    concatenative,
    first_fit_decreasing,
    first_fit_shuffle,
    modified_first_fit_decreasing,
    split_to_count,
    wanted_bins,
)


class SequencePacker(Protocol):
    """What `get_packer` returns."""

    def pack(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return bins of indices into `lengths`, each index in exactly one; none for no sequences.

        Args:
            lengths: Tokens per sequence.

        Raises:
            ValueError: A length is not within 1..capacity, or there are fewer sequences than
                required bins; names the numbers.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packer:
    algorithm: Callable[[Sequence[int]], Bins]
    bin_capacity: int
    min_bin_count: int
    bin_count_multiple: int
    allow_empty_bins: bool

    def pack(self, lengths: Sequence[int]) -> Bins:
        _check_lengths(lengths, self.bin_capacity)
        if not lengths:
            return []
        bins = self.algorithm(lengths)
        count = wanted_bins(
            len(bins),
            min_bin_count=self.min_bin_count,
            bin_count_multiple=self.bin_count_multiple,
        )
        return split_to_count(bins, lengths, count, allow_empty=self.allow_empty_bins)


def get_packer(
    algorithm: str,
    bin_capacity: int,
    *,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    seed: int = 0,
    cost: SequenceCost | None = None,
    allow_empty_bins: bool = False,
) -> SequencePacker:
    """Return a packer by the name of its algorithm.

    `concatenative` keeps the order; `first_fit_decreasing` and `modified_first_fit_decreasing` use
    few bins; `first_fit_shuffle` mixes short and long sequences. `cost_balanced` uses as few bins
    as first-fit decreasing and orders them so that bin `k` belongs to rank
    `k % bin_count_multiple`, with about equal cost per rank.

    Example:
        get_packer("first_fit_decreasing", 10).pack([6, 5, 4, 5]) -> [[0, 2], [1, 3]]

    Args:
        algorithm: One of the names above.
        bin_capacity: Token capacity of a bin.
        min_bin_count: Minimum number of bins; bins are split to reach it.
        bin_count_multiple: The number of bins is rounded up to a multiple of this, by splitting
            bins, so that all ranks get the same number.
        seed: Seed of the random order of `first_fit_shuffle`.
        cost: What `cost_balanced` balances; the number of tokens when None.
        allow_empty_bins: Add empty bins if there are fewer sequences than required bins, instead
            of raising.

    Raises:
        ValueError: The algorithm is unknown, or a number is not positive.
    """
    min_bin_count = 1 if min_bin_count is None else min_bin_count
    bin_count_multiple = 1 if bin_count_multiple is None else bin_count_multiple
    check_positive("bin_capacity", bin_capacity)
    check_positive("min_bin_count", min_bin_count)
    check_positive("bin_count_multiple", bin_count_multiple)
    algorithms: dict[str, Callable[[Sequence[int]], Bins]] = {
        "concatenative": partial(concatenative, capacity=bin_capacity),
        "first_fit_decreasing": partial(first_fit_decreasing, capacity=bin_capacity),
        "first_fit_shuffle": partial(first_fit_shuffle, capacity=bin_capacity, seed=seed),
        "modified_first_fit_decreasing": partial(
            modified_first_fit_decreasing, capacity=bin_capacity
        ),
        "cost_balanced": partial(
            cost_balanced,
            capacity=bin_capacity,
            ranks=bin_count_multiple,
            min_bin_count=min_bin_count,
            cost=SequenceCost() if cost is None else cost,
        ),
    }
    if algorithm not in algorithms:
        raise ValueError(f"algorithm={algorithm!r} is none of {', '.join(sorted(algorithms))}")
    return _Packer(
        algorithm=algorithms[algorithm],
        bin_capacity=bin_capacity,
        min_bin_count=min_bin_count,
        bin_count_multiple=bin_count_multiple,
        allow_empty_bins=allow_empty_bins,
    )


def _check_lengths(lengths: Sequence[int], capacity: int) -> None:
    """Raise a `ValueError` that names the first length not within 1..capacity."""
    # `min` and `max` run in C; the loop runs only to find the offender.
    if lengths and min(lengths) >= 1 and max(lengths) <= capacity:
        return
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(
                f"sequence {index} has {length} tokens, which is not within 1..{capacity}, "
                f"the capacity of a bin"
            )
