"""From the arguments of `shard_by_batch_size` to a plan per shard: check everything, then plan."""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NotRequired, TypedDict, TypeVar, cast

import torch

from rl_batched_data.packing.cost import SequenceCost
from rl_batched_data.padding import round_up
from rl_batched_data.sharding.dynamic import (
    DynamicBatching,
    DynamicBatchingArgs,
    plan_dynamic_shards,
)
from rl_batched_data.sharding.packing import (
    SequencePacking,
    SequencePackingArgs,
    plan_packed_shards,
)
from rl_batched_data.sharding.shards import (
    ShardPlan,
    check_positive,
    expand_groups,
    plan_balanced_shards,
    plan_shards,
)

OptionsT = TypeVar("OptionsT", bound="ShardingOptions")
NumberT = TypeVar("NumberT", int, float)


class BalancingArgs(TypedDict):
    """The `balancing_args` of `shard_by_batch_size`."""

    input_lengths_key: NotRequired[str]
    """The entry with the tokens of each row; `input_lengths` when absent."""
    cost: NotRequired[SequenceCost]
    """What is balanced; the tokens when absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balancing:
    """`BalancingArgs` with defaults."""

    input_lengths_key: str = "input_lengths"
    cost: SequenceCost = field(default_factory=SequenceCost)


ShardingOptions = Balancing | DynamicBatching | SequencePacking


def parse_options(
    *,
    dynamic_batching_args: DynamicBatchingArgs | None,
    sequence_packing_args: SequencePackingArgs | None,
    balancing_args: BalancingArgs | None,
) -> ShardingOptions | None:
    """Return the options of the one way of sharding that is asked for, or None.

    Raises:
        ValueError: Two ways are asked for, or a key is unknown, missing or out of range.
    """
    given: list[tuple[str, type[ShardingOptions], Mapping[str, Any] | None]] = [
        ("dynamic_batching_args", DynamicBatching, dynamic_batching_args),
        ("sequence_packing_args", SequencePacking, sequence_packing_args),
        ("balancing_args", Balancing, balancing_args),
    ]
    asked = [(name, kind, args) for name, kind, args in given if args is not None]
    if len(asked) > 1:
        raise ValueError(f"{asked[0][0]} and {asked[1][0]} exclude each other: give one of them")
    return _parse(*asked[0]) if asked else None


def plan_batch(
    entries: Mapping[str, Any],
    num_rows: int,
    *,
    shards: int,
    batch_size: int | None,
    allow_uneven_shards: bool,
    options: ShardingOptions | None,
    rows_per_group: int,
) -> list[ShardPlan]:
    """Return one plan per shard, in rows.

    Raises:
        ValueError: A key is missing, or numbers are out of range or do not divide.
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
    elif isinstance(options, Balancing):
        costs = options.cost.of_all(read_lengths(entries, options.input_lengths_key))
        plans = plan_balanced_shards(
            [sum(group) for group in _groups(costs, rows_per_group)],
            shards=shards,
            batch_size=groups_per_batch,
            allow_uneven_shards=allow_uneven_shards,
        )
    else:
        plans = _plan_micro_batches(entries, options, shards, groups_per_batch, rows_per_group)
    return [expand_groups(plan, rows_per_group) for plan in plans]


def read_lengths(
    entries: Mapping[str, Any], lengths_key: str, input_key: str | None = None
) -> list[int]:
    """Return the tokens of each row.

    Raises:
        ValueError: An entry is missing or has the wrong shape, or a length is not within 1 and the
            width of `input_key`; names key, row and numbers.
    """
    for key, num_axes in ((lengths_key, 1), (input_key, 2)):
        if key is not None and key not in entries:
            raise ValueError(f"{key!r} is missing; the batch has {sorted(entries)}")
        if key is not None and (
            not isinstance(entries[key], torch.Tensor) or entries[key].ndim < num_axes
        ):
            raise ValueError(f"{key!r} must be a tensor with at least {num_axes} axes")
    lengths = cast(list[int], entries[lengths_key].tolist())
    highest = max(lengths, default=1) if input_key is None else int(entries[input_key].shape[1])
    for row, length in enumerate(lengths):
        if not 1 <= length <= highest:
            within = f"within 1..{highest}, the width of {input_key!r}"
            limit = "at least 1" if input_key is None else within
            raise ValueError(f"{lengths_key!r}[{row}]={length} must be {limit}")
    return lengths


def _plan_micro_batches(
    entries: Mapping[str, Any],
    options: DynamicBatching | SequencePacking,
    shards: int,
    groups_per_batch: int | None,
    rows_per_group: int,
) -> list[ShardPlan]:
    lengths = read_lengths(entries, options.input_lengths_key, options.input_key)
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


def _groups(values: Sequence[NumberT], size: int) -> list[Sequence[NumberT]]:
    return [values[start : start + size] for start in range(0, len(values), size)]
