"""Plans of shards and micro-batches: integers, made before any tensor is touched."""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, NotRequired, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from rl_batched_data.columns import Column, check_positive, round_up
from rl_batched_data.packing.cost import SequenceCost
from rl_batched_data.packing.packers import SequencePacker, get_packer


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """The rows of one shard, in order, and their division into global batches and micro-batches.

    Example, 8 rows over 2 shards in global batches of 4; the plan of the first shard:
        rows               = [0, 1, 4, 5]
        elem_counts_per_gb = [2, 2]
    """

    rows: list[int]
    """Row indices into the full batch."""
    elem_counts_per_gb: list[int]
    """The shard's number of rows in each global batch; global batches are consecutive in `rows`."""
    micro_batch_indices: list[list[list[int]]] | None = None
    """Per global batch, `[start, end)` of each micro-batch, relative to that global batch."""
    micro_batch_lengths: list[list[int]] | None = None
    """Per global batch, the width (dynamic) or the tokens (packed) of each micro-batch."""
    micro_batch_options: ShardingOptions | None = None
    """The options that the micro-batches were planned with."""


class DynamicBatchingArgs(TypedDict):
    """The `dynamic_batching_args` of `shard_by_batch_size`."""

    max_tokens_per_microbatch: int
    """Token budget of a micro-batch, padding included."""
    sequence_length_round: NotRequired[int]
    """Widths are rounded up to a multiple of this; default 1."""
    input_key: NotRequired[str]
    """The entry whose second dim is the sequence; default `input_ids`."""
    input_lengths_key: NotRequired[str]
    """The entry with the number of tokens of each row; default `input_lengths`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicBatching:
    """Validated `DynamicBatchingArgs`, with defaults."""

    max_tokens_per_microbatch: int
    sequence_length_round: int = 1
    input_key: str = "input_ids"
    input_lengths_key: str = "input_lengths"

    def __post_init__(self) -> None:
        check_positive("max_tokens_per_microbatch", self.max_tokens_per_microbatch)
        check_positive("sequence_length_round", self.sequence_length_round)


class SequencePackingArgs(TypedDict):
    """The `sequence_packing_args` of `shard_by_batch_size`."""

    max_tokens_per_microbatch: int
    """Token budget of a micro-batch, padding included."""
    algorithm: NotRequired[str]
    """Name of the packer, see `get_packer`; default `modified_first_fit_decreasing`."""
    input_key: NotRequired[str]
    """The entry whose second dim is the sequence; default `input_ids`."""
    input_lengths_key: NotRequired[str]
    """The entry with the number of tokens of each row; default `input_lengths`."""
    sequence_length_pad_multiple: NotRequired[int]
    """Each sequence is padded to a multiple of this; default 1."""
    cost: NotRequired[SequenceCost]
    """What `cost_balanced` balances; default the number of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePacking:
    """Validated `SequencePackingArgs`, with defaults."""

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
        """The budget, rounded down to what padded sequences can fill."""
        multiple = self.sequence_length_pad_multiple
        return self.max_tokens_per_microbatch // multiple * multiple

    def packed_length(self, tokens: int) -> int:
        """Return the length that a micro-batch of `tokens` tokens is padded to."""
        return round_up(max(tokens, 1), self.sequence_length_pad_multiple)


ShardingOptions: TypeAlias = DynamicBatching | SequencePacking


class _ShardBatch(NamedTuple):
    """The units of one global batch in one shard, micro-batch after micro-batch."""

    units: list[int]
    sizes: list[int]
    """The number of units of each micro-batch."""
    lengths: list[int]
    """The width (dynamic) or the tokens (packed) of each micro-batch."""


def parse_options(
    *,
    dynamic_batching_args: DynamicBatchingArgs | None,
    sequence_packing_args: SequencePackingArgs | None,
) -> ShardingOptions | None:
    """Return the validated micro-batch options, or None if neither argument is given.

    Raises:
        ValueError: Both are given, or a key is unknown, missing or out of range.
    """
    if dynamic_batching_args is not None and sequence_packing_args is not None:
        raise ValueError(
            "dynamic_batching_args and sequence_packing_args exclude each other: give one of them"
        )
    if dynamic_batching_args is not None:
        _check_keys("dynamic_batching_args", DynamicBatching, dynamic_batching_args)
        return DynamicBatching(**dynamic_batching_args)
    if sequence_packing_args is not None:
        _check_keys("sequence_packing_args", SequencePacking, sequence_packing_args)
        return SequencePacking(**sequence_packing_args)
    return None


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
    """Return one plan per shard, in row indices; see `BatchedDataDict.shard_by_batch_size`.

    Raises:
        ValueError: A key is missing, or a number is out of range or does not divide.
    """
    check_positive("rows_per_group", rows_per_group)
    for name, count in (("rows", num_rows), ("batch_size", batch_size)):
        if count is not None and count % rows_per_group:
            raise ValueError(f"{name}={count} is not a multiple of rows_per_group={rows_per_group}")
    # Groups are planned as units and expanded to rows last: no planner can then split one.
    units_per_batch = None if batch_size is None else batch_size // rows_per_group
    if options is None:
        plans = plan_shards(
            num_rows // rows_per_group,
            shards=shards,
            batch_size=units_per_batch,
            allow_uneven_shards=allow_uneven_shards,
        )
        return [_expand_groups(plan, rows_per_group, options=None) for plan in plans]
    lengths = _read_lengths(
        entries, lengths_key=options.input_lengths_key, input_key=options.input_key
    )
    if isinstance(options, DynamicBatching):
        plans = plan_dynamic_shards(
            lengths.reshape(-1, rows_per_group).max(axis=1),
            options,
            shards=shards,
            batch_size=units_per_batch,
            rows_per_unit=rows_per_group,
        )
    else:
        padded = _rounded_up(lengths, options.sequence_length_pad_multiple)
        plans = plan_packed_shards(
            padded.reshape(-1, rows_per_group).sum(axis=1),
            options,
            shards=shards,
            batch_size=units_per_batch,
            rows_per_unit=rows_per_group,
        )
    return [_expand_groups(plan, rows_per_group, options=options) for plan in plans]


def plan_shards(
    num_rows: int,
    *,
    shards: int,
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
) -> list[ShardPlan]:
    """Return one plan per shard; every global batch is divided into consecutive, equal parts.

    With `allow_uneven_shards`, any number of rows is accepted: the parts of a global batch then
    differ by at most one row, the larger ones first, and may be empty.

    Args:
        num_rows: Number of rows of the full batch.
        shards: Number of shards.
        batch_size: Rows per global batch; all rows when None.
        allow_uneven_shards: Accept row counts that `batch_size` or `shards` does not divide.

    Raises:
        ValueError: A size is not positive, or rows do not divide and shards must be even.
    """
    _check_sizes(shards, batch_size)
    size = num_rows if batch_size is None else batch_size
    advice = "pass allow_uneven_shards=True to distribute the remainder"
    if not allow_uneven_shards and size and num_rows % size:
        raise ValueError(f"{num_rows} rows are not a multiple of batch_size={size}: {advice}")
    if not allow_uneven_shards and size % shards:
        raise ValueError(f"batch_size={size} is not a multiple of shards={shards}: {advice}")
    batches = [
        balanced_bounds(start, end, parts=shards)
        for start, end in _global_batch_bounds(num_rows, batch_size)
    ]
    return [
        ShardPlan(
            rows=[*chain.from_iterable(range(*bounds[shard]) for bounds in batches)],
            elem_counts_per_gb=[len(range(*bounds[shard])) for bounds in batches],
        )
        for shard in range(shards)
    ]


def plan_dynamic_shards(
    lengths: Sequence[int] | npt.NDArray[np.int64],
    options: DynamicBatching,
    *,
    shards: int,
    batch_size: int | None = None,
    rows_per_unit: int = 1,
) -> list[ShardPlan]:
    """Return one plan per shard, all with the same number of micro-batches per global batch.

    Each global batch is sorted by length and dealt to the shards round-robin, so that rows at the
    same position of all shards have about the same length. A micro-batch ends where one more row
    would exceed the budget in any shard; its width is that of the longest row over all shards.

    Example, lengths [2, 8, 4, 16, 28, 32, 2, 32], 2 shards, round to 4, budget 32:
        rows                = [0, 2, 3, 5] and [6, 1, 4, 7]
        micro_batch_indices = [[[0, 2], [2, 3], [3, 4]]] for both
        micro_batch_lengths = [[8, 28, 32]] for both

    Args:
        lengths: Tokens per unit, which is a row, or the longest row of a group that stays together.
        options: Budget and rounding.
        shards: Number of shards.
        batch_size: Units per global batch, the last of which may be short; all units when None.
        rows_per_unit: Number of rows of a unit.

    Raises:
        ValueError: A size is not positive, or a single unit exceeds the budget.
    """
    _check_sizes(shards, batch_size)
    tokens = np.asarray(lengths, dtype=np.int64)
    widths = _rounded_up(tokens, options.sequence_length_round)
    excess = np.flatnonzero(widths * rows_per_unit > options.max_tokens_per_microbatch)
    if len(excess):
        unit = excess[0]
        raise ValueError(
            f"{options.input_lengths_key!r}[{unit * rows_per_unit}] of up to {tokens[unit]} "
            f"tokens takes {rows_per_unit} x {widths[unit]}, more than "
            f"max_tokens_per_microbatch={options.max_tokens_per_microbatch}"
        )
    budget = options.max_tokens_per_microbatch // rows_per_unit
    planned = [
        _plan_dynamic_batch(
            # Stable: units of one length keep their order.
            start + np.argsort(tokens[start:end], kind="stable"),
            widths,
            shards=shards,
            budget=budget,
            filler=options.sequence_length_round,
        )
        for start, end in _global_batch_bounds(len(tokens), batch_size)
    ]
    return _shard_plans(planned, shards)


def plan_packed_shards(
    lengths: Sequence[int] | npt.NDArray[np.int64],
    options: SequencePacking,
    *,
    shards: int,
    batch_size: int | None = None,
    rows_per_unit: int = 1,
) -> list[ShardPlan]:
    """Return one plan per shard, all with the same number of micro-batches per global batch.

    The number of bins of a global batch is a multiple of `shards`; bin `k` goes to shard
    `k % shards`. A shard has a micro-batch without rows only if there are fewer sequences than
    bins.

    Example, lengths [46, 24, 55, 88, 11, 14, 73, 17], 2 shards, capacity 100, modified first-fit
    decreasing:
        rows                = [3, 4, 2, 7, 1] and [6, 5, 0]
        micro_batch_indices = [[[0, 2], [2, 5]]] and [[[0, 2], [2, 3]]]
        micro_batch_lengths = [[99, 96]] and [[87, 46]]

    Args:
        lengths: Padded tokens per unit, which is a row, or all rows of a group that stays together.
        options: Capacity, packer and padding.
        shards: Number of shards.
        batch_size: Units per global batch, the last of which may be short; all units when None.
        rows_per_unit: Number of rows of a unit.

    Raises:
        ValueError: A size is not positive, or a single unit exceeds the capacity.
    """
    _check_sizes(shards, batch_size)
    tokens = np.asarray(lengths, dtype=np.int64)
    excess = np.flatnonzero(tokens > options.capacity)
    if len(excess):
        unit = excess[0]
        raise ValueError(
            f"{options.input_lengths_key!r}: rows {unit * rows_per_unit} to "
            f"{(unit + 1) * rows_per_unit - 1} have {tokens[unit]} tokens, padding included, more "
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
        _plan_packed_batch(start, tokens[start:end].tolist(), packer, options, shards)
        for start, end in _global_batch_bounds(len(tokens), batch_size)
    ]
    return _shard_plans(planned, shards)


def balanced_bounds(start: int, end: int, *, parts: int) -> list[tuple[int, int]]:
    """Return `[start, end)` divided into consecutive parts whose sizes differ by at most one."""
    share, rest = divmod(end - start, parts)
    return list(pairwise(start + part * share + min(part, rest) for part in range(parts + 1)))


def _plan_dynamic_batch(
    order: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
    *,
    shards: int,
    budget: int,
    filler: int,
) -> list[_ShardBatch]:
    """Return each shard's micro-batches, given the units from the shortest to the longest."""
    # The first column is short if shards do not divide the units: it then holds the shortest, and
    # none for the first shards.
    num_short = -len(order) % shards
    dealt = np.concatenate([np.full(num_short, -1), order]).reshape(-1, shards)
    column_widths: list[int] = widths[dealt[:, -1]].tolist()
    bounds = _micro_batch_bounds(column_widths, budget)
    sizes = [high - low for low, high in bounds]
    lengths = [column_widths[high - 1] for _, high in bounds]
    short = _without_first_unit(sizes, lengths, filler) if num_short else (sizes, lengths)
    planned: list[_ShardBatch] = []
    for shard, column in enumerate(dealt.T):
        if shard < num_short:
            planned.append(_ShardBatch(column[1:].tolist(), *short))
        else:
            planned.append(_ShardBatch(column.tolist(), sizes, lengths))
    return planned


def _micro_batch_bounds(column_widths: list[int], budget: int) -> list[tuple[int, int]]:
    """Return `[start, end)` of the columns of each micro-batch, filled greedily."""
    starts: list[int] = []
    for column, width in enumerate(column_widths):
        # Widths ascend, so the newest column's is the padded width of all rows so far.
        if not starts or width * (column + 1 - starts[-1]) > budget:
            starts.append(column)
    return list(pairwise([*starts, len(column_widths)]))


def _without_first_unit(
    sizes: list[int], lengths: list[int], filler: int
) -> tuple[list[int], list[int]]:
    """Return the micro-batches of a shard that lacks the first unit, as many as of the others.

    Every rank runs a forward per micro-batch, and the collectives in it must match: in place of a
    first one that is empty, an empty one of width `filler` is added.
    """
    if sizes[0] > 1:
        return [sizes[0] - 1, *sizes[1:]], lengths
    # No later one can be halved: two of the second column's width exceeded the budget, so two of
    # any later width do, and all have one unit a shard.
    return [*sizes[1:], 0], [*lengths[1:], filler]


def _plan_packed_batch(
    start: int,
    lengths: Sequence[int],
    packer: SequencePacker,
    options: SequencePacking,
    shards: int,
) -> list[_ShardBatch]:
    bins = packer.pack(lengths)
    tokens = [options.packed_length(sum(map(lengths.__getitem__, units))) for units in bins]
    return [
        _ShardBatch(
            units=[start + unit for units in bins[shard::shards] for unit in units],
            sizes=[len(units) for units in bins[shard::shards]],
            lengths=tokens[shard::shards],
        )
        for shard in range(shards)
    ]


def _shard_plans(batches: Sequence[Sequence[_ShardBatch]], shards: int) -> list[ShardPlan]:
    """Return one plan per shard from the micro-batches of each global batch and shard."""
    plans: list[ShardPlan] = []
    for shard in range(shards):
        own = [batch[shard] for batch in batches]
        plans.append(
            ShardPlan(
                rows=[*chain.from_iterable(batch.units for batch in own)],
                elem_counts_per_gb=[len(batch.units) for batch in own],
                micro_batch_indices=[
                    [list(bounds) for bounds in pairwise(accumulate(batch.sizes, initial=0))]
                    for batch in own
                ],
                micro_batch_lengths=[list(batch.lengths) for batch in own],
            )
        )
    return plans


def _expand_groups(
    plan: ShardPlan, rows_per_group: int, *, options: ShardingOptions | None
) -> ShardPlan:
    """Return the plan in rows, given one in groups of `rows_per_group` consecutive rows."""
    if rows_per_group == 1:
        return replace(plan, micro_batch_options=options)
    size, indices = rows_per_group, plan.micro_batch_indices
    return replace(
        plan,
        micro_batch_options=options,
        rows=[group * size + row for group in plan.rows for row in range(size)],
        elem_counts_per_gb=[count * size for count in plan.elem_counts_per_gb],
        micro_batch_indices=None
        if indices is None
        else [[[low * size, high * size] for low, high in batch] for batch in indices],
    )


def _global_batch_bounds(num_rows: int, batch_size: int | None) -> list[tuple[int, int]]:
    """Return `[start, end)` of each global batch, the last of which may be short.

    Without a `batch_size`, all rows are one global batch, even if there are none.
    """
    if batch_size is None:
        return [(0, num_rows)]
    return [(start, min(start + batch_size, num_rows)) for start in range(0, num_rows, batch_size)]


def _read_lengths(
    entries: Mapping[str, Column], *, lengths_key: str, input_key: str
) -> npt.NDArray[np.int64]:
    """Return the number of tokens of each row; raise if one is not within the width."""
    lengths = _tensor(entries, lengths_key, num_axes=1).cpu().numpy().astype(np.int64)
    width = _tensor(entries, input_key, num_axes=2).shape[1]
    outside = np.flatnonzero((lengths < 1) | (lengths > width))
    if len(outside):
        raise ValueError(
            f"{lengths_key!r}[{outside[0]}]={lengths[outside[0]]} must be within 1..{width}, "
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


def _check_sizes(shards: int, batch_size: int | None) -> None:
    check_positive("shards", shards)
    if batch_size is not None:
        check_positive("batch_size", batch_size)


def _check_keys(name: str, kind: type[ShardingOptions], args: Mapping[str, object]) -> None:
    known = {entry.name for entry in fields(kind)}
    if unknown := sorted(set(args) - known):
        raise ValueError(f"{name} has unknown keys {unknown}; it takes {sorted(known)}")
    if "max_tokens_per_microbatch" not in args:
        raise ValueError(f"{name} lacks the key 'max_tokens_per_microbatch'")


def _rounded_up(values: npt.NDArray[np.int64], multiple: int) -> npt.NDArray[np.int64]:
    """Return each value rounded up to a multiple."""
    return -(-values // multiple) * multiple
