"""Which rows go to which shard, as integers. Nothing here touches a tensor."""

from __future__ import annotations

from dataclasses import dataclass


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
    check_positive("shards", shards)
    size = num_rows if batch_size is None else batch_size
    if batch_size is not None:
        check_positive("batch_size", batch_size)
    if not allow_uneven_shards:
        _check_even(num_rows, shards=shards, batch_size=size)
    rows: list[list[int]] = [[] for _ in range(shards)]
    counts: list[list[int]] = [[] for _ in range(shards)]
    for start, end in global_batch_bounds(num_rows, batch_size):
        for shard, (low, high) in enumerate(balanced_bounds(start, end, parts=shards)):
            rows[shard].extend(range(low, high))
            counts[shard].append(high - low)
    return [
        ShardPlan(rows=own, elem_counts_per_gb=per_batch)
        for own, per_batch in zip(rows, counts, strict=True)
    ]


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


def _check_even(num_rows: int, *, shards: int, batch_size: int) -> None:
    advice = "pass allow_uneven_shards=True to share out what is left"
    if batch_size and num_rows % batch_size:
        raise ValueError(f"{num_rows} rows are not a multiple of batch_size={batch_size}: {advice}")
    if batch_size % shards:
        raise ValueError(f"batch_size={batch_size} is not a multiple of shards={shards}: {advice}")
