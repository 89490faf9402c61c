"""The cost of a sequence in FLOPs, and packing that balances it over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_batched_data.packing.first_fit import (
    Bins,
    first_fit_decreasing,
    split_to_count,
    wanted_bins,
)
from rl_batched_data.sharding.balance import balance

# The costliest rank over the mean: below this, the second way is not tried.
_EVEN_ENOUGH = 1.001


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceCost:
    """`per_token * length + per_token_squared * length ** 2`, in any unit.

    Example, the cost of a sequence of 100 tokens:
        SequenceCost(per_token=2.0, per_token_squared=0.01).of(100) -> 200.0 + 100.0 = 300.0
    """

    per_token: float = 1.0
    """Cost of one token in the linear layers."""
    per_token_squared: float = 0.0
    """Cost of attention, per square of the length."""

    def __post_init__(self) -> None:
        smallest = min(self.per_token, self.per_token_squared)
        if smallest < 0 or self.per_token + self.per_token_squared == 0:
            raise ValueError(
                f"per_token={self.per_token} and per_token_squared={self.per_token_squared} must "
                f"not be negative, and not both 0"
            )

    @classmethod
    def from_model(
        cls,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        vocab_size: int,
    ) -> SequenceCost:
        """Return the floating-point operations of a dense decoder's forward pass.

        A gated MLP, causal attention, an output matrix. Training takes three times as much of
        both, which leaves their ratio as it is.
        """
        attention = hidden_size * head_dim * 2 * (num_attention_heads + num_key_value_heads)
        layer = attention + 3 * hidden_size * intermediate_size
        return cls(
            per_token=2 * (num_hidden_layers * layer + hidden_size * vocab_size),
            per_token_squared=2 * num_hidden_layers * num_attention_heads * head_dim,
        )

    def of(self, length: int) -> float:
        """Return the cost of one sequence of `length` tokens."""
        return self.per_token * length + self.per_token_squared * length * length

    def of_all(self, lengths: Sequence[int]) -> list[float]:
        """Return the cost of each sequence."""
        return [self.of(length) for length in lengths]


def cost_balanced(
    lengths: Sequence[int], capacity: int, *, ranks: int, min_bin_count: int, cost: SequenceCost
) -> Bins:
    """Return bins of which number `k` belongs to rank `k % ranks`, each rank's costliest first.

    The sequences are balanced over the ranks, and each rank's own are packed. Where that takes more
    bins than the tokens need, or leaves the ranks uneven, the other way is tried too, to pack all
    and balance the bins: fewer bins win, then the lower cost of the costliest rank. Bins are empty
    only where there are fewer sequences than bins.
    """
    costs = cost.of_all(lengths)
    task = _Task(
        lengths=lengths, costs=costs, capacity=capacity, ranks=ranks, min_bin_count=min_bin_count
    )
    plan = task.sequences_first()
    num_empty, num_bins, highest = task.quality(plan)
    uneven = highest * ranks > sum(costs) * _EVEN_ENOUGH
    if num_empty or uneven or num_bins > task.wanted(-(-sum(lengths) // capacity)):
        plan = min(plan, task.bins_first(), key=task.quality)
    return task.dealt(plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """One packing; its plans are lists of bins per rank, equally many each."""

    lengths: Sequence[int]
    costs: list[float]
    capacity: int
    ranks: int
    min_bin_count: int

    def wanted(self, natural: int) -> int:
        return wanted_bins(natural, min_bin_count=self.min_bin_count, bin_count_multiple=self.ranks)

    def sequences_first(self) -> list[Bins]:
        plan: list[Bins] = []
        for own in balance(self.costs, parts=self.ranks):
            bins = first_fit_decreasing([self.lengths[i] for i in own], self.capacity)
            plan.append([[own[i] for i in content] for content in bins])
        per_rank = self.wanted(max(len(bins) for bins in plan) * self.ranks) // self.ranks
        return [split_to_count(bins, self.lengths, per_rank, allow_empty=True) for bins in plan]

    def bins_first(self) -> list[Bins]:
        bins = first_fit_decreasing(self.lengths, self.capacity)
        bins = split_to_count(bins, self.lengths, self.wanted(len(bins)), allow_empty=True)
        shares = balance([self.cost_of(content) for content in bins], parts=self.ranks)
        return [[bins[number] for number in share] for share in shares]

    def quality(self, plan: list[Bins]) -> tuple[int, int, float]:
        """Return the numbers of empty and of all bins and the highest cost: less is better."""
        num_empty = sum(not content for bins in plan for content in bins)
        highest = max(sum(self.cost_of(content) for content in bins) for bins in plan)
        return num_empty, sum(len(bins) for bins in plan), highest

    def dealt(self, plan: list[Bins]) -> Bins:
        """Return the bins of all ranks, one of each rank in turn.

        Ranks run in step, so each starts with its costliest bin and all do alike work at a time.
        """
        by_cost = [sorted(bins, key=self.cost_of, reverse=True) for bins in plan]
        return [content for step in zip(*by_cost, strict=True) for content in step]

    def cost_of(self, content: list[int]) -> float:
        return sum(self.costs[i] for i in content)
