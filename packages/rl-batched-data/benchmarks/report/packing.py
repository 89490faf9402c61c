"""How good a packing is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_batched_data import SequenceCost


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingMetrics:
    """What became of some sequences that were packed.

    Example, lengths 6, 5, 4, 5 in two bins of 10 tokens:
        PackingMetrics.of([[0, 2], [1, 3]], [6, 5, 4, 5], bin_capacity=10)
            -> num_bins=2, lower_bound=2, utilization=1.0, waste=0.0, imbalance=0.0
    """

    num_sequences: int
    """How many sequences the bins hold."""
    num_bins: int
    """How many bins there are."""
    lower_bound: int
    """No packing has fewer bins: their tokens, or those over half a bin, need as many."""
    utilization: float
    """Tokens over the capacity of all bins, 0 to 1."""
    waste: float
    """The part of the capacity that holds nothing, 0 to 1."""
    imbalance: float
    """The costliest rank over the mean of the ranks, minus 1."""

    @classmethod
    def of(
        cls,
        bins: Sequence[Sequence[int]],
        lengths: Sequence[int],
        bin_capacity: int,
        *,
        ranks: int = 1,
        cost: SequenceCost | None = None,
    ) -> PackingMetrics:
        """Return the metrics of `bins`, of which number `k` belongs to rank `k % ranks`.

        Args:
            bins: Indices into `lengths`.
            lengths: Tokens per sequence.
            bin_capacity: Most tokens per bin.
            ranks: Number of ranks that the bins are dealt to.
            cost: What the imbalance is measured in; tokens when None.
        """
        tokens = sum(lengths[i] for content in bins for i in content)
        capacity = len(bins) * bin_capacity
        utilization = tokens / capacity if capacity else 1.0
        return cls(
            num_sequences=sum(len(content) for content in bins),
            num_bins=len(bins),
            lower_bound=bin_lower_bound(lengths, bin_capacity),
            utilization=utilization,
            waste=1.0 - utilization,
            imbalance=_imbalance(bins, lengths, ranks=ranks, cost=cost or SequenceCost()),
        )


def bin_lower_bound(lengths: Sequence[int], bin_capacity: int) -> int:
    """Return a number of bins below which no packing gets."""
    by_tokens = -(-sum(lengths) // bin_capacity)
    over_half = sum(2 * length > bin_capacity for length in lengths)
    return max(by_tokens, over_half)


def _imbalance(
    bins: Sequence[Sequence[int]], lengths: Sequence[int], *, ranks: int, cost: SequenceCost
) -> float:
    costs = [0.0] * ranks
    for number, content in enumerate(bins):
        costs[number % ranks] += sum(cost.of(lengths[i]) for i in content)
    mean = sum(costs) / ranks
    return max(costs) / mean - 1 if mean else 0.0
