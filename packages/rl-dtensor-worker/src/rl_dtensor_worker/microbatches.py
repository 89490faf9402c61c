"""Which rows each forward takes: planned with integers, the same number on every rank.

FSDP's collectives need every rank to make the same number of passes, and ranks may hold unlike
numbers of rows. A rank that runs out of rows makes its remaining passes over an empty span, which
`take_rows` turns into one masked row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_batched_data import BatchedDataDict

if TYPE_CHECKING:
    from collections.abc import Sequence

Span = tuple[int, int]
"""Rows `[start, end)` of this rank's batch; empty where it has none left."""


def plan_spans(rows_per_rank: Sequence[int], *, rank: int, size: int) -> list[Span]:
    """Return this rank's spans of at most `size` rows, as many as the fullest rank needs.

    Example: rows_per_rank=[5, 2], size=2 -> rank 0: (0,2) (2,4) (4,5); rank 1: (0,2) (2,2) (2,2)
    """
    num_rows = rows_per_rank[rank]
    num_spans = -(-max(rows_per_rank) // size)
    edges = [min(index * size, num_rows) for index in range(num_spans + 1)]
    return list(pairwise(edges))


def plan_steps(
    rows_per_rank: Sequence[int], *, rank: int, local_batch_size: int, micro_batch_size: int
) -> list[list[Span]]:
    """Return this rank's spans of each optimizer step; the last step takes what is left.

    Example: rows_per_rank=[3, 2], local_batch_size=2, micro_batch_size=1
        rank 0: [[(0,1), (1,2)], [(2,3)]]
        rank 1: [[(0,1), (1,2)], [(2,2)]]
    """
    num_steps = -(-max(rows_per_rank) // local_batch_size)
    steps: list[list[Span]] = []
    for step in range(num_steps):
        starts = [min(step * local_batch_size, rows) for rows in rows_per_rank]
        counts = [
            min(local_batch_size, rows - start)
            for rows, start in zip(rows_per_rank, starts, strict=True)
        ]
        spans = plan_spans(counts, rank=rank, size=micro_batch_size)
        steps.append([(starts[rank] + start, starts[rank] + end) for start, end in spans])
    return steps


def gather_row_counts(
    num_rows: int, *, group: dist.ProcessGroup, device: torch.device
) -> list[int]:
    """Return every rank's number of rows, in the group's order. Collective.

    Raises:
        ValueError: No rank has any row.
    """
    counts = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    counts[dist.get_rank(group)] = num_rows
    dist.all_reduce(counts, group=group)
    rows_per_rank = [int(count) for count in counts]
    if not any(rows_per_rank):
        raise ValueError("the batch has no rows: input_ids is empty on every rank")
    return rows_per_rank


def take_rows(
    data: BatchedDataDict[Any], span: Span, *, device: torch.device
) -> BatchedDataDict[Any]:
    """Return the rows of `span` on `device`; for an empty span, one row that counts for nothing."""
    start, end = span
    if start < end:
        # A copy-free view on the CPU: whoever needs to write takes a copy of its own.
        return data.slice(start, end).to(device)
    row: BatchedDataDict[Any] = BatchedDataDict()
    for key, value in data.items():
        if isinstance(value, torch.Tensor):
            row[key] = torch.zeros((1, *value.shape[1:]), dtype=value.dtype, device=device)
        else:
            row[key] = [None]
    row["input_lengths"] = torch.ones_like(row["input_lengths"])
    return row
