"""Micro-batches of as many padded rows as a token budget holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from rl_batched_data.padding import round_up
from rl_batched_data.sharding.plan import (
    MicroBatch,
    ShardPlan,
    check_positive,
    check_sizes,
    global_batch_bounds,
    plan_micro_batches,
)


class DynamicBatchingArgs(TypedDict):
    """The `dynamic_batching_args` of `shard_by_batch_size`."""

    max_tokens_per_microbatch: int
    """Most tokens of a micro-batch, padding included."""
    sequence_length_round: NotRequired[int]
    """Widths are multiples of this; 1 when absent."""
    input_key: NotRequired[str]
    """The entry whose second axis is the sequence; `input_ids` when absent."""
    input_lengths_key: NotRequired[str]
    """The entry with the tokens of each row; `input_lengths` when absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicBatching:
    """`DynamicBatchingArgs`, checked, with defaults."""

    max_tokens_per_microbatch: int
    sequence_length_round: int = 1
    input_key: str = "input_ids"
    input_lengths_key: str = "input_lengths"

    def __post_init__(self) -> None:
        check_positive("max_tokens_per_microbatch", self.max_tokens_per_microbatch)
        check_positive("sequence_length_round", self.sequence_length_round)


def plan_dynamic_shards(
    lengths: Sequence[int],
    options: DynamicBatching,
    *,
    shards: int,
    batch_size: int | None = None,
    rows_per_unit: int = 1,
) -> list[ShardPlan]:
    """Return one plan per shard, all with the same number of micro-batches per global batch.

    Each global batch is sorted by length and dealt out in turn, so that rows which meet at the same
    position of all shards are about equally long. A micro-batch closes where the next row would
    take it over the budget in any shard; its width is that of the longest row in all shards.

    Example, lengths [2, 8, 4, 16, 28, 32, 2, 32], 2 shards, round to 4, budget 32:
        rows                = [0, 2, 3, 5] and [6, 1, 4, 7]
        micro_batch_indices = [[[0, 2], [2, 3], [3, 4]]] for both
        micro_batch_lengths = [[8, 28, 32]] for both

    Args:
        lengths: Tokens per unit, which is a row or a group of rows that stay together.
        options: Budget and rounding.
        shards: Number of shards.
        batch_size: Units of a global batch, the last of which may be short; all when None.
        rows_per_unit: Rows that a unit has in a micro-batch.

    Raises:
        ValueError: A size is not positive, or a unit is over the budget by itself.
    """
    check_sizes(shards, batch_size)
    widths = [round_up(length, options.sequence_length_round) for length in lengths]
    for unit, width in enumerate(widths):
        if width * rows_per_unit > options.max_tokens_per_microbatch:
            raise ValueError(
                f"{options.input_lengths_key!r}[{unit * rows_per_unit}] of up to {lengths[unit]} "
                f"tokens takes {rows_per_unit} x {width}, more than "
                f"max_tokens_per_microbatch={options.max_tokens_per_microbatch}"
            )
    most_rows = options.max_tokens_per_microbatch // rows_per_unit
    planned: list[list[list[MicroBatch]]] = []
    for start, end in global_batch_bounds(len(lengths), batch_size):
        order = sorted(range(start, end), key=lengths.__getitem__)
        planned.append(
            _plan_global_batch(
                order, widths, shards=shards, budget=most_rows, filler=options.sequence_length_round
            )
        )
    return plan_micro_batches(planned, shards)


def _plan_global_batch(
    order: list[int], widths: Sequence[int], *, shards: int, budget: int, filler: int
) -> list[list[MicroBatch]]:
    """Return the micro-batches of each shard; where rows do not divide, the shortest are short."""
    num_missing = -len(order) % shards
    dealt = [None] * num_missing + order
    columns = [dealt[start : start + shards] for start in range(0, len(dealt), shards)]
    column_widths = [widths[units[-1]] for units in columns if units[-1] is not None]
    cuts = _cut(column_widths, budget)
    planned: list[list[MicroBatch]] = []
    for shard in range(shards):
        own: list[MicroBatch] = []
        for low, high in cuts:
            units = [column[shard] for column in columns[low:high]]
            present = [unit for unit in units if unit is not None]
            if present:
                own.append(MicroBatch(present, column_widths[high - 1]))
        planned.append(_raise_to(len(cuts), own, filler))
    return planned


def _cut(column_widths: list[int], budget: int) -> list[tuple[int, int]]:
    """Return `[start, end)` of the columns of each micro-batch."""
    cuts: list[tuple[int, int]] = []
    low = 0
    for column, width in enumerate(column_widths):
        if width * (column + 1 - low) > budget:
            cuts.append((low, column))
            low = column
    if column_widths:
        cuts.append((low, len(column_widths)))
    return cuts


def _raise_to(count: int, micro_batches: list[MicroBatch], filler: int) -> list[MicroBatch]:
    """Return `count` micro-batches: the largest are halved, and what is still missing is empty."""
    own = list(micro_batches)
    while len(own) < count:
        rows, width = max(own, key=lambda micro: len(micro.rows), default=MicroBatch([], filler))
        if len(rows) < 2:
            own.append(MicroBatch([], filler))
            continue
        place = own.index(MicroBatch(rows, width))
        middle = len(rows) // 2
        own[place : place + 1] = [
            MicroBatch(rows[:middle], width),
            MicroBatch(rows[middle:], width),
        ]
    return own
