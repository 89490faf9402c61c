"""Micro-batches of whole sequences, to be concatenated without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from rl_batched_data.packing.cost import SequenceCost
from rl_batched_data.packing.packers import SequencePacker, get_packer
from rl_batched_data.padding import round_up
from rl_batched_data.sharding.plan import (
    MicroBatch,
    ShardPlan,
    check_positive,
    check_sizes,
    global_batch_bounds,
    plan_micro_batches,
)


class SequencePackingArgs(TypedDict):
    """The `sequence_packing_args` of `shard_by_batch_size`."""

    max_tokens_per_microbatch: int
    """Most tokens of a micro-batch."""
    algorithm: NotRequired[str]
    """Name of the packer, see `get_packer`; `modified_first_fit_decreasing` when absent."""
    input_key: NotRequired[str]
    """The entry whose second axis is the sequence; `input_ids` when absent."""
    input_lengths_key: NotRequired[str]
    """The entry with the tokens of each row; `input_lengths` when absent."""
    sequence_length_pad_multiple: NotRequired[int]
    """Each sequence is padded to a multiple of this; 1 when absent."""
    cost: NotRequired[SequenceCost]
    """What `cost_balanced` balances; the tokens when absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePacking:
    """`SequencePackingArgs`, checked, with defaults."""

    max_tokens_per_microbatch: int
    algorithm: str = "modified_first_fit_decreasing"
    input_key: str = "input_ids"
    input_lengths_key: str = "input_lengths"
    sequence_length_pad_multiple: int = 1
    cost: SequenceCost | None = None

    def __post_init__(self) -> None:
        check_positive("max_tokens_per_microbatch", self.max_tokens_per_microbatch)
        check_positive("sequence_length_pad_multiple", self.sequence_length_pad_multiple)
        if self.sequence_length_pad_multiple > self.max_tokens_per_microbatch:
            raise ValueError(
                f"sequence_length_pad_multiple={self.sequence_length_pad_multiple} is more than "
                f"max_tokens_per_microbatch={self.max_tokens_per_microbatch}"
            )

    @property
    def capacity(self) -> int:
        """The tokens that padded sequences can fill."""
        multiple = self.sequence_length_pad_multiple
        return self.max_tokens_per_microbatch // multiple * multiple

    def packed_length(self, tokens: int) -> int:
        """Return the length to which a micro-batch of that many tokens is padded."""
        return round_up(max(tokens, 1), self.sequence_length_pad_multiple)


def plan_packed_shards(
    lengths: Sequence[int],
    options: SequencePacking,
    *,
    shards: int,
    batch_size: int | None = None,
    rows_per_unit: int = 1,
) -> list[ShardPlan]:
    """Return one plan per shard, all with the same number of micro-batches per global batch.

    Each global batch is packed into bins, a multiple of `shards` of them; bin `k` goes to shard
    `k % shards`. A shard has a micro-batch without rows only where sequences are fewer than bins.

    Example, lengths [46, 24, 55, 88, 11, 14, 73, 17], 2 shards, capacity 100, modified first-fit
    decreasing:
        rows                = [3, 4, 2, 7, 1] and [6, 5, 0]
        micro_batch_indices = [[[0, 2], [2, 5]]] and [[[0, 2], [2, 3]]]
        micro_batch_lengths = [[99, 96]] and [[87, 46]]

    Args:
        lengths: Padded tokens per unit, which is a row or a group of rows that stay together.
        options: Capacity, packer and padding.
        shards: Number of shards.
        batch_size: Units of a global batch, the last of which may be short; all when None.
        rows_per_unit: Rows that a unit has.

    Raises:
        ValueError: A size is not positive, or a unit is over the capacity by itself.
    """
    check_sizes(shards, batch_size)
    for unit, length in enumerate(lengths):
        if length > options.capacity:
            raise ValueError(
                f"{options.input_lengths_key!r}: rows {unit * rows_per_unit} to "
                f"{(unit + 1) * rows_per_unit - 1} have {length} tokens, padding included, more "
                f"than max_tokens_per_microbatch={options.max_tokens_per_microbatch}"
            )
    packer = get_packer(
        options.algorithm,
        options.capacity,
        min_bin_count=shards,
        bin_count_multiple=shards,
        cost=options.cost,
        allow_empty_bins=True,
    )
    planned = [
        _plan_global_batch(start, lengths[start:end], packer, options, shards)
        for start, end in global_batch_bounds(len(lengths), batch_size)
    ]
    return plan_micro_batches(planned, shards)


def _plan_global_batch(
    start: int,
    lengths: Sequence[int],
    packer: SequencePacker,
    options: SequencePacking,
    shards: int,
) -> list[list[MicroBatch]]:
    bins = packer.pack(lengths)
    micro_batches = [
        MicroBatch(
            [start + index for index in content],
            options.packed_length(sum(lengths[index] for index in content)),
        )
        for content in bins
    ]
    return [micro_batches[shard::shards] for shard in range(shards)]
