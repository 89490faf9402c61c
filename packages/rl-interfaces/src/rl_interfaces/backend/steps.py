"""A batch's way through a worker: checks, optimizer steps, micro-batches, counts, row scores.

FSDP's collectives need every rank to make the same number of forward passes, and ranks may hold
different numbers of rows. A rank that runs out of rows makes its remaining passes over an empty
span, for which one masked row is substituted. A batch that carries a plan of dynamic or packed
micro-batches follows that plan, see `BatchedDataDict.shard_by_batch_size`.
"""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from rl_batched_data import (
    BatchedDataDict,
    PackedTensor,
    SlicedDataDict,
    round_up,
    verify_right_padding,
)
from rl_batched_data.packing.packed_sequences import PackedSequences
from rl_batched_data.packing.shared_prefixes import SharedPrefixes, share_prefixes
from rl_batched_data.sharding import DynamicBatching, SequencePacking

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_interfaces.config.types import ResolvedConfig

Span = tuple[int, int]
"""Rows `[start, end)`; empty where a rank has none left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The input of one forward pass."""

    span: Span
    """Rows of this rank's batch; empty if it has none left."""
    rows: SlicedDataDict
    """Those rows on the device; a masked row for an empty span."""
    width: int | None = None
    """Sequence length of the forward; None: that of the longest row, which is on the device."""
    packed: PackedSequences | None = None
    """The offsets of packed rows; None: they are padded."""
    shared: SharedPrefixes | None = None
    """How rows share prefixes, packed; None: each row is computed whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Concatenation:
    """The alignment that the parallel layout requires of packed micro-batches."""

    always: bool = False
    """Pack rows even if the batch's plan does not."""
    sequence_multiple: int = 1
    """Each sequence is padded to a multiple of this many tokens."""
    total_multiple: int = 1
    """The packed micro-batch is padded to a multiple of this many tokens."""
    shares_prefixes: bool = False
    """Pack rows with a common start, which is computed once. Not with a `sequence_multiple`."""

    def rounded(self, multiple: int) -> Concatenation:
        """Return this alignment with totals that are multiples of `multiple` as well."""
        return replace(self, total_multiple=math.lcm(self.total_multiple, multiple))

    def of(self, rows: SlicedDataDict) -> PackedSequences:
        """Return the packed offsets of `rows`."""
        lengths, multiple, planned = rows["input_lengths"], self.sequence_multiple, 0
        if isinstance(rows.micro_batch_options, SequencePacking):
            assert rows.micro_batch_lengths is not None, "a plan has lengths"
            # Rows are padded as the plan has counted them, and as the layout requires.
            multiple = math.lcm(multiple, rows.micro_batch_options.sequence_length_pad_multiple)
            planned = rows.micro_batch_lengths[0][0]
        total = sum(round_up(size, multiple) for size in lengths.tolist())
        return PackedSequences.of(
            lengths,
            rows["input_ids"].shape[1],
            pad_multiple=multiple,
            total_length=round_up(max(total, planned), self.total_multiple),
        )

    def share(self, rows: SlicedDataDict) -> SharedPrefixes | None:
        """Return how `rows` share prefixes; None if they are not to, or have too little in common.

        Rows with media are left alone: tokens of other images look the same.
        """
        has_media = any(isinstance(column, PackedTensor) for column in rows.values())
        if not self.shares_prefixes or has_media:
            return None
        return share_prefixes(
            rows["input_ids"], rows["input_lengths"], total_multiple=self.total_multiple
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """This rank's share of one global batch."""

    rows: SlicedDataDict
    start: int
    """Index of the first of `rows` in this rank's batch."""
    spans: Sequence[Span]
    """Rows of each micro-batch, counted from `start`."""
    concatenation: Concatenation
    rows_per_group: int = 1
    """Rows that stay together, see `LossFunction.rows_per_group`."""

    @property
    def row_spans(self) -> list[Span]:
        """The rows of each micro-batch, counted from the start of this rank's batch."""
        return [(self.start + low, self.start + high) for low, high in self.spans]

    def micro_batches(
        self, device: torch.device, *, num_passes: int | None = None
    ) -> Iterator[MicroBatch]:
        """Yield each micro-batch on `device`.

        Args:
            device: The device of the yielded rows.
            num_passes: How many to yield; masked ones are appended to the step's own. None: only
                the step's own.
        """
        pieces = list(zip(self.spans, self._slices(), strict=True))
        end, idle = self.spans[-1][1], _stand_in(pieces[-1][1], self.rows_per_group)
        if idle.micro_batch_lengths is not None:
            # Not in the plan: packed into the smallest possible length.
            idle.micro_batch_lengths = [[1]]
        pieces += [((end, end), idle)] * ((num_passes or len(pieces)) - len(pieces))
        for span, rows in pieces:
            yield self._micro_batch(span, rows, device)

    def _micro_batch(self, span: Span, rows: SlicedDataDict, device: torch.device) -> MicroBatch:
        low, high = span
        options = self.rows.micro_batch_options
        # A view of the caller's batch, which is read-only: a copy is made only for another device.
        taken = rows if low < high else _stand_in(rows, self.rows_per_group)
        shared = self.concatenation.share(taken)
        is_packed = self.concatenation.always or isinstance(options, SequencePacking)
        packed = self.concatenation.of(taken) if is_packed and shared is None else None
        width = taken["input_ids"].shape[1]
        if not isinstance(options, DynamicBatching):
            # Columns that are padding in all rows are not computed.
            width = min(int(taken["input_lengths"].max()), width)
        return MicroBatch(
            span=(self.start + low, self.start + high),
            width=width,
            packed=None if packed is None else packed.to(device),
            shared=None if shared is None else shared.to(device),
            # CUDA stages pageable memory before the call returns: nothing waits for the device.
            rows=taken.to(device, non_blocking=device.type != "cpu"),
        )

    def _slices(self) -> Iterator[SlicedDataDict]:
        options = self.rows.micro_batch_options
        if isinstance(options, DynamicBatching):
            return self.rows.make_microbatch_iterator_with_dynamic_shapes()
        if isinstance(options, SequencePacking):
            return self.rows.make_microbatch_iterator_for_packable_sequences()
        return (self.rows.slice(low, high) for low, high in self.spans)


def planned_by(resolved: ResolvedConfig) -> str | None:
    """Return the enabled section by which the driver plans micro-batches; None: fixed sizes."""
    sections = ("dynamic_batching", "sequence_packing")
    return next((name for name in sections if resolved[name]["enabled"]), None)


def plan_spans(rows_per_rank: Sequence[int], *, rank: int, size: int) -> list[Span]:
    """Return this rank's spans of at most `size` rows, as many as the rank with most rows needs.

    Example: rows_per_rank=[5, 2], size=2 -> rank 0: (0,2) (2,4) (4,5); rank 1: (0,2) (2,2) (2,2)
    """
    num_rows = rows_per_rank[rank]
    num_spans = -(-max(rows_per_rank) // size)
    # Clamped: a rank with fewer rows gets empty spans, and so as many passes as the others.
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


def gather_numbers(
    numbers: Sequence[int], *, group: dist.ProcessGroup, device: torch.device
) -> list[list[int]]:
    """Return every rank's `numbers`, in rank order within the group. Collective.

    Args:
        numbers: As many on every rank.
        group: The ranks.
        device: The device of the group's collectives.
    """
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        # On a GPU, reading them back would wait for all that is queued there.
        return [list(numbers)]
    table = torch.zeros(num_ranks, len(numbers), dtype=torch.int64)
    table[dist.get_rank(group)] = torch.tensor(numbers)
    table = table.to(device, non_blocking=True)
    dist.all_reduce(table, group=group)
    return table.tolist()


def steps_of(
    data: BatchedDataDict,
    *,
    local_batch_size: int | None = None,
    given: int | None,
    default: int,
    planned_by: str | None,
    concatenation: Concatenation,
    group: dist.ProcessGroup,
    device: torch.device,
    rows_per_group: int = 1,
) -> list[Step]:
    """Return the optimizer steps of `data`, by its plan or in micro-batches of a fixed size.

    Collective.

    Args:
        data: This rank's rows.
        local_batch_size: Rows of each step on this rank; None: one step of all rows.
        given: Rows of a micro-batch, from the caller's argument.
        default: Rows of a micro-batch if `given` is None, from the config.
        planned_by: The enabled config section that plans micro-batches. None: fixed sizes.
        concatenation: The alignment of packed rows.
        group: The data-parallel ranks.
        device: The device of the group's collectives.
        rows_per_group: Consecutive rows that stay in one micro-batch.

    Raises:
        ValueError: The batch has no rows, its plan is missing or contradicts `given`, or a size is
            not a multiple of `rows_per_group`.
    """
    plan = _plan_of(data, rows_per_group)
    # Before any check that may raise on this rank alone: the others would wait here.
    facts = gather_numbers(
        [data.size, 0, 0, 0] if plan is None else [data.size, *plan], group=group, device=device
    )
    rows_per_rank = [rows for rows, *_ in facts]
    # All ranks have the same counts, so that they raise together.
    if not any(rows_per_rank):
        raise ValueError("the batch has no rows: input_ids is empty on every rank")
    if isinstance(data, SlicedDataDict) and data.micro_batch_options is not None:
        if given is not None:
            raise ValueError(
                f"micro-batches of {given} rows contradict the plan that the batch carries"
            )
        _check_groups(rows_per_group, {"rows of the ranks": rows_per_rank})
        _check_plans(facts, data, rank=dist.get_rank(group), rows_per_group=rows_per_group)
        return planned_steps(data, concatenation=concatenation, rows_per_group=rows_per_group)
    if planned_by is not None:
        raise ValueError(
            f"policy.{planned_by}.enabled=True, and the batch carries no plan: "
            "pass what shard_by_batch_size returns"
        )
    local_batch_size = local_batch_size or max(rows_per_rank)
    micro_batch_size = given or default
    _check_groups(
        rows_per_group,
        {
            "rows of the ranks": rows_per_rank,
            "rows of a global batch on each rank": [local_batch_size],
            "micro-batch size": [micro_batch_size],
        },
    )
    return fixed_steps(
        data,
        rows_per_rank,
        rank=dist.get_rank(group),
        local_batch_size=local_batch_size,
        micro_batch_size=micro_batch_size,
        concatenation=concatenation,
        rows_per_group=rows_per_group,
    )


def fixed_steps(
    data: BatchedDataDict,
    rows_per_rank: Sequence[int],
    *,
    rank: int,
    local_batch_size: int,
    micro_batch_size: int,
    concatenation: Concatenation,
    rows_per_group: int = 1,
) -> list[Step]:
    """Return the steps of a batch without a plan, see `plan_steps`."""
    steps: list[Step] = []
    for spans in plan_steps(
        rows_per_rank,
        rank=rank,
        local_batch_size=local_batch_size,
        micro_batch_size=micro_batch_size,
    ):
        start, end = spans[0][0], spans[-1][1]
        own = [(low - start, high - start) for low, high in spans]
        rows = data.slice(start, end)
        steps.append(
            Step(
                rows=rows,
                start=start,
                spans=own,
                concatenation=concatenation,
                rows_per_group=rows_per_group,
            )
        )
    return steps


def planned_steps(
    data: SlicedDataDict, *, concatenation: Concatenation, rows_per_group: int = 1
) -> list[Step]:
    """Return the steps of a batch that carries a plan."""
    counts, indices = data.elem_counts_per_gb, data.micro_batch_indices
    assert counts is not None, "a plan counts its rows"
    assert indices is not None, "a plan has micro-batches"
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [
        Step(
            rows=data.get_batch(index),
            start=starts[index],
            spans=[(low, high) for low, high in indices[index]],
            concatenation=concatenation,
            rows_per_group=rows_per_group,
        )
        for index in range(len(counts))
    ]


def _plan_of(data: BatchedDataDict, rows_per_group: int) -> tuple[int, int, int] | None:
    """Return what the ranks compare of a batch's plan; None: it carries none.

    Returns:
        A checksum of the micro-batches of each global batch, the rows that the plan counts, and
        whether it splits a group of rows.
    """
    if not isinstance(data, SlicedDataDict) or data.micro_batch_options is None:
        return None
    counts, indices = data.elem_counts_per_gb, data.micro_batch_indices
    assert counts is not None, "a plan counts its rows"
    assert indices is not None, "a plan has micro-batches"
    splits_groups = any(
        edge % rows_per_group for batch in indices for span in batch for edge in span
    )
    passes = repr([len(batch) for batch in indices])
    return zlib.crc32(passes.encode()), sum(counts), int(splits_groups)


def _check_plans(
    facts: Sequence[Sequence[int]], data: SlicedDataDict, *, rank: int, rows_per_group: int
) -> None:
    """Raise unless all ranks make equally many passes and no plan splits a group.

    On every rank alike: a rank that raised alone would leave the others waiting in the next
    collective.
    """
    for other, (num_rows, _, planned, _) in enumerate(facts):
        if num_rows != planned:
            raise ValueError(
                f"rank {other}: elem_counts_per_gb of the plan is {planned} rows in all, and the "
                f"batch has {num_rows}"
            )
    if len({checksum for _, checksum, _, _ in facts}) > 1:
        passes = [len(batch) for batch in data.micro_batch_indices or ()]
        raise ValueError(
            f"the ranks' batches were not sharded together: rank {rank} has {passes} "
            "micro-batches per global batch, another rank has others"
        )
    if any(splits_groups for *_, splits_groups in facts):
        raise ValueError(
            f"the plan splits groups of rows_per_group={rows_per_group} rows, which the loss needs "
            f"in one micro-batch: pass rows_per_group={rows_per_group} to shard_by_batch_size"
        )


def _check_groups(rows_per_group: int, counts: dict[str, list[int]]) -> None:
    """Raise unless every count is a multiple of the group size; on every rank alike."""
    for name, values in counts.items():
        if any(value % rows_per_group for value in values):
            raise ValueError(
                f"{name} {values}: not multiples of rows_per_group={rows_per_group} of the loss"
            )


def _stand_in(rows: SlicedDataDict, num_rows: int) -> SlicedDataDict:
    """Return `num_rows` masked rows of one token, with the keys and widths of `rows`."""
    row: SlicedDataDict = SlicedDataDict()
    for key, value in rows.items():
        is_tensor = isinstance(value, torch.Tensor)
        row[key] = value.new_zeros((num_rows, *value.shape[1:])) if is_tensor else [None] * num_rows
    # One token, not none: attention kernels and packing need at least one.
    row["input_lengths"] = torch.ones_like(row["input_lengths"])
    row.micro_batch_lengths = rows.micro_batch_lengths
    row.micro_batch_options = rows.micro_batch_options
    return row


def check_scoring_batch(data: BatchedDataDict, *, vocab_size: int | None = None) -> None:
    """Raise unless `data` has right-padded `input_ids` with their `input_lengths`.

    Args:
        data: `input_ids` `[batch, seq]`, `input_lengths` `[batch]`, and any other columns.
        vocab_size: Tokens that the model has. None: they are not checked.

    Raises:
        ValueError: Names the key, the row and the numbers.
    """
    verify_right_padding(data)
    data.check_sizes()
    # Tokens that stand for images may be outside the vocabulary: the model replaces them.
    has_media = any(isinstance(column, PackedTensor) for column in data.values())
    if vocab_size is not None and not has_media:
        _check_tokens(data, vocab_size)


def _check_tokens(data: BatchedDataDict, vocab_size: int) -> None:
    """Raise if the model has no embedding for a token, which torch reports as an `IndexError`."""
    input_ids: torch.Tensor = data["input_ids"]
    wrong = _outside(input_ids, vocab_size) & _is_token(data)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"'input_ids'[{row}, {column}]={int(input_ids[row, column])} is not one of the model's "
            f"{vocab_size} tokens"
        )


def with_readable_padding(data: BatchedDataDict, *, vocab_size: int) -> BatchedDataDict:
    """Return `data` with padding that the model has an embedding for, as -100 is not.

    Returns:
        `data` itself if its padding is fine, else a copy whose padding is token 0.
    """
    input_ids: torch.Tensor = data["input_ids"]
    if not _outside(input_ids, vocab_size).any():
        return data
    replaced = copy.copy(data)
    replaced["input_ids"] = input_ids.where(_is_token(data), 0)
    return replaced


def _outside(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return (tokens < 0) | (tokens >= vocab_size)


def _is_token(data: BatchedDataDict) -> torch.Tensor:
    """Return `[batch, seq]` bool, False at padding."""
    lengths = data["input_lengths"].to(data["input_ids"].device)
    return torch.arange(data["input_ids"].shape[1], device=lengths.device) < lengths[:, None]


def check_training_batch(
    data: BatchedDataDict, *, needs_token_mask: bool, vocab_size: int | None = None
) -> None:
    """Raise unless `data` also has the masks of a training batch, and its shapes agree.

    Args:
        data: The columns of `check_scoring_batch`, `sample_mask` `[batch]` and `token_mask`
            `[batch, seq]`.
        needs_token_mask: Whether the loss is token-level; otherwise `token_mask` may be missing.
        vocab_size: See `check_scoring_batch`.

    Raises:
        ValueError: Names the key, the row and the numbers.
    """
    check_scoring_batch(data, vocab_size=vocab_size)
    if "sample_mask" not in data:
        raise ValueError("'sample_mask' is missing: [batch], 1 for each row that counts")
    if needs_token_mask and "token_mask" not in data:
        raise ValueError(
            "'token_mask' is missing, which a token-level loss needs: "
            "[batch, seq], 1 for each token that is a target"
        )
    num_rows, width = data["input_ids"].shape
    shapes = {"sample_mask": (num_rows,), "token_mask": (num_rows, width)}
    for key, value in data.items():
        if not isinstance(value, torch.Tensor):
            continue
        is_matrix_of_tokens = value.ndim == len(("batch", "seq"))
        wanted = shapes.get(key, (num_rows, width) if is_matrix_of_tokens else value.shape)
        if tuple(value.shape) != tuple(wanted):
            raise ValueError(
                f"{key!r} has shape {list(value.shape)}, expected {list(wanted)}, "
                f"as 'input_ids' has {[num_rows, width]}"
            )


def positive(name: str, value: int | None) -> int | None:
    """Return `value`, an optional argument of the call `name`.

    Raises:
        ValueError: It is not positive.
    """
    if value is not None and value <= 0:
        raise ValueError(f"{name}={value} must be positive")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCounts:
    """The valid samples and tokens of one global batch, over all data-parallel ranks."""

    valid_seqs: torch.Tensor
    """0-d float32 on the device: sum of `sample_mask`."""
    valid_toks: torch.Tensor
    """0-d float32 on the device: sum of `token_mask[:, 1:] * sample_mask[:, None]`."""
    num_valid_seqs: float
    """`valid_seqs` on the host."""
    num_valid_toks: float
    """`valid_toks` on the host."""

    @classmethod
    def of(
        cls, steps: Sequence[Step], *, group: dist.ProcessGroup, device: torch.device
    ) -> list[LossCounts]:
        """Return the counts of each step's global batch, in one all-reduce. Collective.

        Args:
            steps: This rank's share of each: `sample_mask`, and `token_mask` or `input_ids`.
            group: The data-parallel ranks.
            device: The device of the group's collectives.
        """
        own = torch.stack([_own_counts(step.rows) for step in steps])
        counts = own.to(device, non_blocking=True)
        dist.all_reduce(counts, group=group)
        # All at once: each read waits until the device has done what was queued before.
        numbers = cast("list[list[float]]", counts.tolist())
        return [
            cls(
                valid_seqs=row[0],
                valid_toks=row[1],
                num_valid_seqs=num_valid_seqs,
                num_valid_toks=num_valid_toks,
            )
            for row, (num_valid_seqs, num_valid_toks) in zip(counts, numbers, strict=True)
        ]

    @classmethod
    def total(cls, counts: Sequence[LossCounts]) -> LossCounts:
        """Return the counts of several global batches together."""
        return cls(
            valid_seqs=torch.stack([each.valid_seqs for each in counts]).sum(),
            valid_toks=torch.stack([each.valid_toks for each in counts]).sum(),
            num_valid_seqs=sum(each.num_valid_seqs for each in counts),
            num_valid_toks=sum(each.num_valid_toks for each in counts),
        )

    @property
    def divisors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The counts as a loss divides by them; 1 for an empty batch, which then has loss 0.

        Fractional masks may have a count below 1.
        """
        seqs, toks = self.valid_seqs, self.valid_toks
        return torch.where(seqs > 0, seqs, 1.0), torch.where(toks > 0, toks, 1.0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is valid."""
        return self.num_valid_seqs == 0 or self.num_valid_toks == 0


def _own_counts(rows: BatchedDataDict) -> torch.Tensor:
    """Return this rank's valid samples and tokens, `[2]` float32."""
    sample_mask = rows["sample_mask"].float()
    if "token_mask" in rows:
        # Column 0 is no target, as no position predicts it.
        num_tokens = (rows["token_mask"][:, 1:].float() * sample_mask[:, None]).sum()
    else:
        num_tokens = sample_mask.sum() * (rows["input_ids"].shape[1] - 1)
    return torch.stack([sample_mask.sum(), num_tokens])


@dataclass(kw_only=True, slots=True)
class TrainReport:
    """The accumulated results of one `train` call, the same on all ranks that hold one shard.

    Tensors stay where they are until `read`: a value that is read in the middle of a call lets the
    device run out of queued work.
    """

    losses: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Per step, 0-d float32: the loss over all data-parallel ranks."""
    grad_norms: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Per step, 0-d float32, before clipping."""
    metrics: list[dict[str, float | torch.Tensor]] = field(
        default_factory=list[dict[str, "float | torch.Tensor"]]
    )
    """Per micro-batch of this rank, `num_valid_samples` among them."""

    def read(self) -> TrainNumbers:
        """Return the numbers on the host, in one copy from the device."""
        names = [name for each in self.metrics for name in each]
        values = [value for each in self.metrics for value in each.values()]
        numbers = read_numbers([*self.losses, *self.grad_norms, *values])
        losses, norms = len(self.losses), len(self.grad_norms)
        metrics: defaultdict[str, list[float]] = defaultdict(list)
        pairs = iter(zip(names, numbers[losses + norms :], strict=True))
        for each in self.metrics:
            found = dict(islice(pairs, len(each)))
            # A micro-batch without a valid sample has no metrics.
            for name, value in found.items() if found["num_valid_samples"] > 0 else ():
                metrics[name].append(value)
        return TrainNumbers(
            losses=torch.tensor(numbers[:losses], dtype=torch.float32),
            grad_norms=torch.tensor(numbers[losses : losses + norms], dtype=torch.float32),
            metrics=metrics,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainNumbers:
    """A `TrainReport` on the host."""

    losses: torch.Tensor
    """`[steps]` float32."""
    grad_norms: torch.Tensor
    """`[steps]` float32; empty in eval mode."""
    metrics: defaultdict[str, list[float]]
    """Per micro-batch of this rank that has a valid sample."""


def read_numbers(values: Sequence[float | torch.Tensor]) -> list[float]:
    """Return plain numbers; those in tensors of one element are read in one copy per device.

    Integers stay integers up to 2 ** 53. What is no tensor is returned as it is.
    """
    numbers = list(values)
    places: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            places.setdefault(value.device, []).append(index)
    for indices in places.values():
        tensors = [cast("torch.Tensor", values[index]).detach() for index in indices]
        # float64 holds every float32, and what is counted.
        read = torch.stack([tensor.double().reshape(()) for tensor in tensors]).tolist()
        for index, tensor, number in zip(indices, tensors, cast("list[float]", read), strict=True):
            numbers[index] = number if tensor.is_floating_point() else int(number)
    return cast("list[float]", numbers)


class RowScores:
    """The scores of all rows of a batch, on the CPU; 0 where no micro-batch has a value.

    Args:
        data: The rows.
    """

    def __init__(self, data: BatchedDataDict) -> None:
        self._shape = data["input_ids"].shape
        self.scores: dict[str, torch.Tensor] = {}

    def put(self, span: Span, values: Mapping[str, torch.Tensor]) -> None:
        """Store the scores of the rows `span`; `values` may have further, masked rows.

        Args:
            span: Rows of the batch.
            values: `[rows]` or `[rows, seq, ...]` each. Columns beyond the narrower width are
                padding.
        """
        start, end = span
        for key, rows in values.items():
            # The first micro-batch shows dtype and trailing dims, such as k.
            if key not in self.scores:
                shape = (*self._shape[: min(rows.ndim, 2)], *rows.shape[2:])
                self.scores[key] = torch.zeros(shape, dtype=rows.dtype)
            target, taken = self.scores[key][start:end], rows[: end - start]
            if rows.ndim == 1:
                target.copy_(taken)
                continue
            width = min(target.shape[1], taken.shape[1])
            target[:, :width] = taken[:, :width].cpu()
