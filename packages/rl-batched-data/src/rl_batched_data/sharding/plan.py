"""Which rows go to which shard, as integers. Nothing here touches a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """The rows of one shard, in order, and how they divide into global and micro-batches.

    Example, 8 rows over 2 shards in global batches of 4; the plan of the first shard:
        rows               = [0, 1, 4, 5]
        elem_counts_per_gb = [2, 2]
    """

    rows: list[int]
    """Row indices of the whole batch."""
    elem_counts_per_gb: list[int]
    """The shard's rows of each global batch; they follow one another in `rows`."""
    micro_batch_indices: list[list[list[int]]] | None = None
    """Per global batch, `[start, end)` of each micro-batch, counted from that global batch."""
    micro_batch_lengths: list[list[int]] | None = None
    """Per global batch, the width (dynamic) or the tokens (packed) of each micro-batch."""


class MicroBatch(NamedTuple):
    """The rows of one micro-batch, and its width (dynamic) or its tokens (packed)."""

    rows: list[int]
    length: int


def plan_shards(
    num_rows: int,
    *,
    shards: int,
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
) -> list[ShardPlan]:
    """Return one plan per shard: every global batch is split into consecutive, equal parts.

    With `allow_uneven_shards` any number of rows is legal: the parts of a global batch then differ
    by at most one row, the larger ones first, and a part may be empty.

    Args:
        num_rows: Rows of the whole batch.
        shards: Number of shards.
        batch_size: Rows of a global batch; the whole batch when None.
        allow_uneven_shards: Accept rows that neither `batch_size` nor `shards` divide.

    Raises:
        ValueError: A size is not positive, or rows do not divide and may not be uneven.
    """
    batches = _global_batches(num_rows, shards, batch_size, allow_uneven_shards)
    return _join(
        [
            [list(range(low, high)) for low, high in balanced_bounds(start, end, parts=shards)]
            for start, end in batches
        ],
        shards,
    )


def plan_micro_batches(
    batches: Sequence[Sequence[Sequence[MicroBatch]]], shards: int
) -> list[ShardPlan]:
    """Return one plan per shard from the micro-batches of each global batch and shard."""
    plans: list[ShardPlan] = []
    for shard in range(shards):
        own = [batch[shard] for batch in batches]
        sizes = [[len(micro.rows) for micro in batch] for batch in own]
        plans.append(
            ShardPlan(
                rows=[row for batch in own for micro in batch for row in micro.rows],
                elem_counts_per_gb=[sum(batch) for batch in sizes],
                micro_batch_indices=[_bounds(batch) for batch in sizes],
                micro_batch_lengths=[[micro.length for micro in batch] for batch in own],
            )
        )
    return plans


def expand_groups(plan: ShardPlan, rows_per_group: int) -> ShardPlan:
    """Return the plan of rows, where `plan` is one of groups of `rows_per_group` rows each."""
    size = rows_per_group
    indices = plan.micro_batch_indices
    return replace(
        plan,
        rows=[group * size + row for group in plan.rows for row in range(size)],
        elem_counts_per_gb=[count * size for count in plan.elem_counts_per_gb],
        micro_batch_indices=None
        if indices is None
        else [[[low * size, high * size] for low, high in batch] for batch in indices],
    )


def global_batch_bounds(num_rows: int, batch_size: int | None) -> list[tuple[int, int]]:
    """Return `[start, end)` of each global batch; the last one may be short.

    Without a `batch_size`, all rows are one global batch, even if there are none.
    """
    if batch_size is None:
        return [(0, num_rows)]
    return [(start, min(start + batch_size, num_rows)) for start in range(0, num_rows, batch_size)]


def balanced_bounds(start: int, end: int, *, parts: int) -> list[tuple[int, int]]:
    """Return `[start, end)` cut into consecutive parts that differ by at most one in size."""
    share, rest = divmod(end - start, parts)
    bounds: list[tuple[int, int]] = []
    low = start
    for part in range(parts):
        high = low + share + (part < rest)
        bounds.append((low, high))
        low = high
    return bounds


def check_positive(name: str, value: int) -> None:
    """Raise a `ValueError` that names `name`, unless `value` is at least 1."""
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


def check_sizes(shards: int, batch_size: int | None) -> None:
    """Raise a `ValueError` that names the size which is not positive."""
    check_positive("shards", shards)
    if batch_size is not None:
        check_positive("batch_size", batch_size)


def _global_batches(
    num_rows: int, shards: int, batch_size: int | None, allow_uneven_shards: bool
) -> list[tuple[int, int]]:
    check_sizes(shards, batch_size)
    size = num_rows if batch_size is None else batch_size
    advice = "pass allow_uneven_shards=True to share out what is left"
    if not allow_uneven_shards and size and num_rows % size:
        raise ValueError(f"{num_rows} rows are not a multiple of batch_size={size}: {advice}")
    if not allow_uneven_shards and size % shards:
        raise ValueError(f"batch_size={size} is not a multiple of shards={shards}: {advice}")
    return global_batch_bounds(num_rows, batch_size)


def _join(batches: list[list[list[int]]], shards: int) -> list[ShardPlan]:
    """Return one plan per shard from the rows of each global batch and shard."""
    return [
        ShardPlan(
            rows=[row for batch in batches for row in batch[shard]],
            elem_counts_per_gb=[len(batch[shard]) for batch in batches],
        )
        for shard in range(shards)
    ]


def _bounds(sizes: list[int]) -> list[list[int]]:
    bounds: list[list[int]] = []
    low = 0
    for size in sizes:
        bounds.append([low, low + size])
        low += size
    return bounds
