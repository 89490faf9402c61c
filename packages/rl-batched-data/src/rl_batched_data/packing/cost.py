"""The cost of a sequence in FLOPs, and packing that balances it over data-parallel ranks.

`balance` partitions items into parts of about equal cost by differencing: a group assigns some
items to all parts, and groups are merged in pairs, the costliest part of one with the cheapest of
the other, until one is left. The order of the merges decides the quality: all pairs at once while
there are many groups, the widest spread first when there are few. Swaps of single items between
the costliest and the cheapest part then reduce the remaining difference.

Shapes in `balance`: `N` items, `G` groups, `P` parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_batched_data.packing.first_fit import (
    Bins,
    first_fit_decreasing,
    split_to_count,
    wanted_bins,
)

# Below this ratio of the costliest rank to the mean, the alternative is not tried.
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
    """Cost of attention, per squared length."""

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
        """Return the FLOPs of the forward pass of a dense decoder.

        It has gated MLPs, causal attention and an output matrix. A product of `[m, k]` and `[k, n]`
        counts as `2mkn` (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Training multiplies
        both terms by three, which leaves their ratio unchanged.
        """
        # Query and output projections, and the smaller key and value projections.
        attention = hidden_size * head_dim * 2 * (num_attention_heads + num_key_value_heads)
        layer = attention + 3 * hidden_size * intermediate_size
        # Scores and weighted values are 4 * heads * head_dim * length^2; the causal mask halves it.
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
    """Return bins, of which bin `k` belongs to rank `k % ranks`, each rank's costliest first.

    Sequences are balanced over ranks, then packed per rank. If that takes more bins than the tokens
    need, or leaves the ranks uneven, packing all sequences and then balancing the bins is tried
    too; the plan with fewer bins wins, then that with the cheaper costliest rank. Bins are empty
    only if there are fewer sequences than bins.
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
    """The inputs of `cost_balanced`; a plan has a list of bins per rank, all of one length."""

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
        """Return the numbers of empty and of all bins and the highest cost; lower is better."""
        num_empty = sum(not content for bins in plan for content in bins)
        highest = max(sum(self.cost_of(content) for content in bins) for bins in plan)
        return num_empty, sum(len(bins) for bins in plan), highest

    def dealt(self, plan: list[Bins]) -> Bins:
        """Return the bins of all ranks, interleaved."""
        # Collectives synchronise ranks, so the n-th bins of all ranks should cost about the same.
        by_cost = [sorted(bins, key=self.cost_of, reverse=True) for bins in plan]
        return [content for step in zip(*by_cost, strict=True) for content in step]

    def cost_of(self, content: list[int]) -> float:
        return sum(self.costs[i] for i in content)


_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
# Negated spread, serial number (breaks ties), and per part its sum and its (group, part) members.
_Group = tuple[float, int, list[float], list[list[tuple[int, int]]]]

# Above this many groups, merging one pair at a time takes too long.
_FEW_GROUPS = 256
# Swapping ends when the costliest part is this close to the mean, or after this many per part.
_CLOSE = 1e-4
_SWAPS_PER_PART = 8


def balance(costs: Sequence[float], *, parts: int) -> list[list[int]]:
    """Return the indices of `costs` partitioned into `parts` whose sizes differ by at most one.

    The balanced largest-first differencing method (Michiels, Korst and Aarts 2003,
    doi:10.1016/S0304-3975(03)00142-5), in O(n log n) for given `parts`.

    Example, the costs 8, 7, 6, 5, 4, 3 over 2 parts:
        balance([8, 7, 6, 5, 4, 3], parts=2) -> [[1, 2, 4], [0, 3, 5]], with the sums 17 and 16
    """
    if not costs:
        return [[] for _ in range(parts)]
    costs_N = np.asarray(costs, dtype=np.float64)
    order_N = np.argsort(-costs_N, kind="stable")
    num_groups = -(-len(costs_N) // parts)
    sums_GP = np.zeros(num_groups * parts)
    sums_GP[: len(costs_N)] = costs_N[order_N]
    sums_GP = sums_GP.reshape(num_groups, parts)
    group_N, part_N = np.divmod(np.arange(len(costs_N), dtype=np.int64), parts)
    while len(sums_GP) > _FEW_GROUPS:
        sums_GP, group_N, part_N = _merge_all_pairs(sums_GP, group_N, part_N)
    part_N = _merge_widest_pairs(sums_GP)[group_N, part_N]
    members = [np.sort(order_N[part_N == part]) for part in range(parts)]
    _swap_items(costs_N, members)
    return [np.sort(own).tolist() for own in members]


def _merge_all_pairs(
    sums_GP: _Floats, group_N: _Ints, part_N: _Ints
) -> tuple[_Floats, _Ints, _Ints]:
    """Merge groups of adjacent spread in pairs, from the widest spread to the narrowest."""
    rank_of_part_GP = np.argsort(np.argsort(-sums_GP, axis=1, kind="stable"), axis=1)
    part_N = rank_of_part_GP[group_N, part_N]
    sums_GP = -np.sort(-sums_GP, axis=1)
    by_spread_G = np.argsort(sums_GP[:, -1] - sums_GP[:, 0], kind="stable")
    place_G = np.empty_like(by_spread_G)
    place_G[by_spread_G] = np.arange(len(by_spread_G))
    sums_GP = sums_GP[by_spread_G]
    group_N, is_second_N = np.divmod(place_G[group_N], 2)
    part_N = np.where(is_second_N == 1, sums_GP.shape[1] - 1 - part_N, part_N)
    merged_GP = sums_GP[::2].copy()
    merged_GP[: len(sums_GP) // 2] += sums_GP[1::2, ::-1]
    return merged_GP, group_N, part_N


def _merge_widest_pairs(sums_GP: _Floats) -> _Ints:
    """Return the final part of each part of each group, `[group, part]`."""
    num_groups, parts = sums_GP.shape
    part_of_group_GP = np.empty((num_groups, parts), dtype=np.int64)
    heap: list[_Group] = []
    all_sums: list[list[float]] = sums_GP.tolist()
    for group, sums in enumerate(all_sums):
        heap.append(_sorted_group(group, sums, [[(group, part)] for part in range(parts)]))
    heapq.heapify(heap)
    serial = num_groups
    while len(heap) > 1:
        _, _, sums, members = heapq.heappop(heap)
        _, _, other_sums, other_members = heapq.heappop(heap)
        joined = [a + b for a, b in zip(members, reversed(other_members), strict=True)]
        totals = [a + b for a, b in zip(sums, reversed(other_sums), strict=True)]
        heapq.heappush(heap, _sorted_group(serial, totals, joined))
        serial += 1
    for final, members in enumerate(heap[0][3]):
        for group, part in members:
            part_of_group_GP[group, part] = final
    return part_of_group_GP


def _sorted_group(serial: int, sums: list[float], members: list[list[tuple[int, int]]]) -> _Group:
    """Return a heap entry, widest spread first, with the parts from costliest to cheapest."""
    order = sorted(range(len(sums)), key=sums.__getitem__, reverse=True)
    spread = sums[order[0]] - sums[order[-1]]
    return -spread, serial, [sums[part] for part in order], [members[part] for part in order]


def _swap_items(costs_N: _Floats, members: list[_Ints]) -> None:
    """Swap items between the costliest and the cheapest part, in place, while that helps."""
    sums_P = np.array([costs_N[own].sum() for own in members])
    mean = float(sums_P.mean())
    num_swaps = _SWAPS_PER_PART * len(members) if all(map(len, members)) else 0
    for _ in range(num_swaps):
        high, low = int(sums_P.argmax()), int(sums_P.argmin())
        if sums_P[high] <= mean * (1 + _CLOSE):
            return
        wanted = min(sums_P[high] - mean, mean - sums_P[low])
        from_high, from_low = _best_swap(costs_N[members[high]], costs_N[members[low]], wanted)
        given, taken = int(members[high][from_high]), int(members[low][from_low])
        moved = costs_N[given] - costs_N[taken]
        if not 0 < moved < sums_P[high] - sums_P[low]:
            return
        members[high][from_high], members[low][from_low] = taken, given
        sums_P[high] -= moved
        sums_P[low] += moved


def _best_swap(high_H: _Floats, low_L: _Floats, wanted: float) -> tuple[int, int]:
    """Return the positions of the two costs whose difference is closest to `wanted`."""
    order_L = np.argsort(low_L)
    after_H = np.searchsorted(low_L[order_L], high_H - wanted)
    nearest_2H = np.clip([after_H - 1, after_H], 0, len(low_L) - 1)
    error_2H = np.abs(high_H - low_L[order_L][nearest_2H] - wanted)
    side, from_high = np.unravel_index(int(error_2H.argmin()), error_2H.shape)
    return int(from_high), int(order_L[nearest_2H[side, from_high]])
