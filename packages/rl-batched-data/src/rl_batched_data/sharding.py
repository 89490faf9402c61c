"""Plans of shards and micro-batches: integers, made before any tensor is touched."""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar, cast

import torch

from rl_batched_data.columns import Column
from rl_batched_data.packing.cost import SequenceCost
from rl_batched_data.packing.packers import SequencePacker, get_packer
from rl_batched_data.padding import check_positive, round_up


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
            _plan_dynamic_batch(
                order, widths, shards=shards, budget=most_rows, filler=options.sequence_length_round
            )
        )
    return plan_micro_batches(planned, shards)


def _plan_dynamic_batch(
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
        _plan_packed_batch(start, lengths[start:end], packer, options, shards)
        for start, end in global_batch_bounds(len(lengths), batch_size)
    ]
    return plan_micro_batches(planned, shards)


def _plan_packed_batch(
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


OptionsT = TypeVar("OptionsT", bound="ShardingOptions")


ShardingOptions = DynamicBatching | SequencePacking


def parse_options(
    *,
    dynamic_batching_args: DynamicBatchingArgs | None,
    sequence_packing_args: SequencePackingArgs | None,
) -> ShardingOptions | None:
    """Return the validated micro-batch options, or None if neither argument is given.

    Raises:
        ValueError: Both are given, or a key is unknown, missing or out of range.
    """
    given: list[tuple[str, type[ShardingOptions], Mapping[str, Any] | None]] = [
        ("dynamic_batching_args", DynamicBatching, dynamic_batching_args),
        ("sequence_packing_args", SequencePacking, sequence_packing_args),
    ]
    asked = [(name, kind, args) for name, kind, args in given if args is not None]
    if len(asked) > 1:
        raise ValueError(f"{asked[0][0]} and {asked[1][0]} exclude each other: give one of them")
    return _parse(*asked[0]) if asked else None


def plan_batch(
    entries: Mapping[str, Column],
    num_rows: int,
    *,
    shards: int,
    batch_size: int | None,
    allow_uneven_shards: bool,
    options: ShardingOptions | None,
    rows_per_group: int,
) -> list[ShardPlan]:
    """Return one plan per shard, in row indices.

    Raises:
        ValueError: A key is missing, or a number is out of range or does not divide.
    """
    check_positive("rows_per_group", rows_per_group)
    for name, count in (("rows", num_rows), ("batch_size", batch_size)):
        if count is not None and count % rows_per_group:
            raise ValueError(f"{name}={count} is not a multiple of rows_per_group={rows_per_group}")
    groups_per_batch = None if batch_size is None else batch_size // rows_per_group
    if options is None:
        plans = plan_shards(
            num_rows // rows_per_group,
            shards=shards,
            batch_size=groups_per_batch,
            allow_uneven_shards=allow_uneven_shards,
        )
    else:
        plans = _plan_micro_batches(entries, options, shards, groups_per_batch, rows_per_group)
    return [expand_groups(plan, rows_per_group) for plan in plans]


def read_lengths(entries: Mapping[str, Column], *, lengths_key: str, input_key: str) -> list[int]:
    """Return the number of tokens of each row.

    Raises:
        ValueError: An entry is missing or has the wrong shape, or a length is outside 1..width of
            `input_key`; names key, row and numbers.
    """
    lengths = cast(list[int], _tensor(entries, lengths_key, num_axes=1).tolist())
    width = _tensor(entries, input_key, num_axes=2).shape[1]
    for row, length in enumerate(lengths):
        if not 1 <= length <= width:
            raise ValueError(
                f"{lengths_key!r}[{row}]={length} must be within 1..{width}, "
                f"the width of {input_key!r}"
            )
    return lengths


def _tensor(entries: Mapping[str, Column], key: str, *, num_axes: int) -> torch.Tensor:
    if key not in entries:
        raise ValueError(f"{key!r} is missing; the batch has {sorted(entries)}")
    column = entries[key]
    if not isinstance(column, torch.Tensor) or column.ndim < num_axes:
        raise ValueError(f"{key!r} must be a tensor with at least {num_axes} axes")
    return column


def _plan_micro_batches(
    entries: Mapping[str, Column],
    options: DynamicBatching | SequencePacking,
    shards: int,
    groups_per_batch: int | None,
    rows_per_group: int,
) -> list[ShardPlan]:
    lengths = read_lengths(
        entries, lengths_key=options.input_lengths_key, input_key=options.input_key
    )
    if isinstance(options, DynamicBatching):
        longest = [max(group) for group in _groups(lengths, rows_per_group)]
        return plan_dynamic_shards(
            longest,
            options,
            shards=shards,
            batch_size=groups_per_batch,
            rows_per_unit=rows_per_group,
        )
    padded = [round_up(length, options.sequence_length_pad_multiple) for length in lengths]
    return plan_packed_shards(
        [sum(group) for group in _groups(padded, rows_per_group)],
        options,
        shards=shards,
        batch_size=groups_per_batch,
        rows_per_unit=rows_per_group,
    )


def _parse(name: str, kind: type[OptionsT], args: Mapping[str, Any]) -> OptionsT:
    known = {entry.name for entry in fields(kind)}
    if unknown := sorted(set(args) - known):
        raise ValueError(f"{name} has unknown keys {unknown}; it takes {sorted(known)}")
    if "max_tokens_per_microbatch" in known - set(args):
        raise ValueError(f"{name} lacks the key 'max_tokens_per_microbatch'")
    return kind(**args)


def _groups(values: Sequence[int], size: int) -> list[Sequence[int]]:
    return [values[start : start + size] for start in range(0, len(values), size)]
