"""What `shard_by_batch_size` calls: validate its arguments, then make one plan per shard."""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

import torch

from rl_batched_data.columns import Column
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
from rl_batched_data.sharding.plan import (
    ShardPlan,
    check_positive,
    expand_groups,
    plan_shards,
)

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
