"""Divide items over parts so that all parts have the same number of them and about equal cost.

A group holds some items divided over all parts; groups are merged in pairs, the costliest part of
one with the cheapest of the other, until one is left (the differencing method). Which pair is next
decides the quality: all of them at once while groups are many, the widest apart when they are few.
Swaps of single items between the costliest and the cheapest part then even out what is left.

Shapes: `N` items, `G` groups, `P` parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]
# Minus the spread, a serial number, and per part the sum and the (group, part) it is made of.
_Group = tuple[float, int, list[float], list[list[tuple[int, int]]]]

# Merging one pair at a time is worth its time for this many groups.
_FEW_GROUPS = 256
# Swapping ends when the costliest part is this close to the mean, or after so many swaps per part.
_CLOSE = 1e-4
_SWAPS_PER_PART = 8


def balance(costs: Sequence[float], *, parts: int) -> list[list[int]]:
    """Return the indices of `costs` divided over `parts`, whose sizes differ by at most one.

    The balanced largest differencing method (Michiels, Korst and Aarts 2003,
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
    """Merge the group with the widest spread with the next one, and so on down the list."""
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
    """Return where each part of each group ends up once all groups are merged into one."""
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
    """Return a heap entry: the widest spread first, parts from the costliest to the cheapest."""
    order = sorted(range(len(sums)), key=sums.__getitem__, reverse=True)
    spread = sums[order[0]] - sums[order[-1]]
    return -spread, serial, [sums[part] for part in order], [members[part] for part in order]


def _swap_items(costs_N: _Floats, members: list[_Ints]) -> None:
    """Swap items, in place, between the costliest and the cheapest part while that helps."""
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
