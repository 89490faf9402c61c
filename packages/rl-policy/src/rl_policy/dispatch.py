"""Batches between the driver and the data-parallel ranks: checks, sharding, gathering. No Ray here.

    caller's batch --check--> --plan_by_batch_size--> the rows of each data-parallel rank
    caller's order <--gather-- one result per data-parallel rank

Every check runs on the driver before anything is sent: an error on one rank costs a round trip, and
may leave the other ranks waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from rl_batched_data import (
    BatchedDataDict,
    DynamicBatchingArgs,
    SequencePackingArgs,
    pad_right,
)
from rl_interfaces import LossType
from rl_interfaces.backend.generation import check_room
from rl_interfaces.backend.steps import check_scoring_batch, check_training_batch

if TYPE_CHECKING:
    from rl_batched_data.sharding import ShardPlan
    from rl_interfaces import (
        GenerationOutputSpec,
        LossFunction,
        TrainOutputSpec,
        WorkerTrainOutputSpec,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudget:
    """A limit of tokens per micro-batch, in place of a fixed number of rows."""

    key: str
    """Its config key, for example `policy.sequence_packing.train_mb_tokens`."""
    dynamic_batching_args: DynamicBatchingArgs | None = None
    sequence_packing_args: SequencePackingArgs | None = None

    @property
    def tokens(self) -> int:
        """The most tokens of a micro-batch, padding included."""
        arguments = self.dynamic_batching_args or self.sequence_packing_args
        assert arguments is not None, "a budget is of one of both"
        return arguments["max_tokens_per_microbatch"]

    @property
    def multiple(self) -> int:
        """What the length of each row is rounded up to."""
        if self.dynamic_batching_args is not None:
            return self.dynamic_batching_args.get("sequence_length_round", 1)
        assert self.sequence_packing_args is not None, "a budget is of one of both"
        return self.sequence_packing_args.get("sequence_length_pad_multiple", 1)

    @property
    def is_packed(self) -> bool:
        """Whether rows share a sequence, so that their own lengths add up."""
        return self.sequence_packing_args is not None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], budget: str) -> TokenBudget | None:
        """Return the budget of a resolved policy config; None if micro-batches have fixed sizes.

        Args:
            config: A resolved policy config.
            budget: `train_mb_tokens` or `logprob_mb_tokens`.
        """
        dynamic, packing = config["dynamic_batching"], config["sequence_packing"]
        if dynamic["enabled"]:
            return cls(
                key=f"policy.dynamic_batching.{budget}",
                dynamic_batching_args={
                    "max_tokens_per_microbatch": dynamic[budget],
                    "sequence_length_round": dynamic["sequence_length_round"],
                },
            )
        if packing["enabled"]:
            return cls(
                key=f"policy.sequence_packing.{budget}",
                sequence_packing_args={
                    "max_tokens_per_microbatch": packing[budget],
                    "algorithm": packing["algorithm"],
                    "sequence_length_pad_multiple": config["make_sequence_length_divisible_by"],
                },
            )
        return None

    def refuse_size(self, name: str, size: int | None) -> None:
        """Raise `ValueError` if a call sets the rows of a micro-batch as well."""
        if size is not None:
            raise ValueError(
                f"{name}={size} contradicts {self.key}, which decides how many rows a "
                "micro-batch has"
            )


class Dispatcher:
    """Checks a policy's batches and shards them over its data-parallel ranks.

    Args:
        config: A resolved policy config.
        data_parallel: Data-parallel ranks.
        pad_token_id: Not used, as padding follows from `input_lengths`.
    """

    def __init__(
        self, config: Mapping[str, Any], *, data_parallel: int, pad_token_id: int | None = None
    ) -> None:
        self._data_parallel = data_parallel
        self._max_length: int | None = config.get("max_total_sequence_length")
        self._global_batch_size: int = config["train_global_batch_size"]
        self._micro_batch_size: int = config["train_micro_batch_size"]
        self._train_budget = TokenBudget.from_config(config, "train_mb_tokens")
        self._scoring_budget = TokenBudget.from_config(config, "logprob_mb_tokens")

    def plan_training(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> tuple[list[ShardPlan], int]:
        """Return the plan of each data-parallel rank's shard, and the rows of a global batch.

        A shard has the rank's rows of every global batch. The last global batch may be short: ranks
        may then differ by a row, and some have none. If the loss has `rows_per_group`, the same
        holds for groups of rows.

        Args:
            data: `input_ids` `[batch, seq]`, `input_lengths` and `sample_mask` `[batch]`, and
                `token_mask` `[batch, seq]` if the loss is token-level.
            loss_fn: The loss.
            gbs: Samples per optimizer step. None: `policy.train_global_batch_size`.
            mbs: Samples per forward per rank. None: `policy.train_micro_batch_size`.

        Raises:
            ValueError: Names the key, the row and the numbers.
        """
        rows_per_group = _group_size(loss_fn)
        size = self._checked_batch_size(gbs, rows_per_group=rows_per_group)
        self._check_training(data, loss_fn, mbs=mbs)
        plans, _ = self._plan(
            data, self._train_budget, batch_size=size, rows_per_group=rows_per_group
        )
        return plans, size

    def plan_backward(
        self, data: BatchedDataDict, loss_fn: LossFunction, *, mbs: int | None = None
    ) -> list[ShardPlan]:
        """Return the plan of each data-parallel rank's shard, with all rows in one global batch.

        Args:
            data: See `plan_training`.
            loss_fn: The loss.
            mbs: Samples per forward per rank. None: `policy.train_micro_batch_size`.

        Raises:
            ValueError: Names the key, the row and the numbers.
        """
        self._check_training(data, loss_fn, mbs=mbs)
        plans, _ = self._plan(data, self._train_budget, rows_per_group=_group_size(loss_fn))
        return plans

    def plan_scoring(
        self, data: BatchedDataDict, *, micro_batch_size: int | None = None
    ) -> tuple[list[ShardPlan], list[int] | None]:
        """Return the plan of each data-parallel rank's shard, and the row order of all shards.

        The order is None if it is the caller's. A rank may have no rows.

        Args:
            data: `input_ids` `[batch, seq]`, `input_lengths` `[batch]`, and any other columns.
            micro_batch_size: Rows per forward, if the call sets it.

        Raises:
            ValueError: Names the key, the row and the numbers.
        """
        if self._scoring_budget is not None:
            self._scoring_budget.refuse_size("micro_batch_size", micro_batch_size)
        self.check_rows(data)
        return self._plan(data, self._scoring_budget)

    def plan_prompts(self, data: BatchedDataDict) -> list[ShardPlan]:
        """Return the plan of each data-parallel rank's prompts, which leave room for a token.

        Raises:
            ValueError: Names the key, the row and the numbers.
        """
        self.check_rows(data)
        if self._max_length is not None:
            limit = f"policy.max_total_sequence_length={self._max_length}"
            check_room(data, longest=self._max_length, limit=limit)
        return plan_in_order(data, data_parallel=self._data_parallel)

    def check_rows(self, data: BatchedDataDict) -> None:
        """Raise `ValueError`, naming key, row and numbers, unless every row can be scored."""
        check_scoring_batch(data)
        self._check_extent(data)

    def _plan(
        self,
        data: BatchedDataDict,
        budget: TokenBudget | None,
        *,
        batch_size: int | None = None,
        rows_per_group: int = 1,
    ) -> tuple[list[ShardPlan], list[int] | None]:
        """Return the plans, with micro-batches under a budget, and the row order of all shards.

        Raises:
            ValueError: A row or group exceeds the budget, or the packing algorithm is unknown.
        """
        if budget is None:
            # Uneven: workers complete short shards with masked rows.
            plans = data.plan_by_batch_size(
                self._data_parallel,
                batch_size=batch_size,
                allow_uneven_shards=True,
                rows_per_group=rows_per_group,
            )
            return plans, None
        try:
            plans = data.plan_by_batch_size(
                self._data_parallel,
                batch_size=batch_size,
                allow_uneven_shards=True,
                dynamic_batching_args=budget.dynamic_batching_args,
                sequence_packing_args=budget.sequence_packing_args,
                rows_per_group=rows_per_group,
            )
        except ValueError as error:
            # The batch knows no config keys: name the one that set the budget.
            raise ValueError(f"{budget.key}: {error}") from error
        return plans, [*chain.from_iterable(plan.rows for plan in plans)]

    def _checked_batch_size(self, gbs: int | None, *, rows_per_group: int) -> int:
        """Return the rows of a global batch; raise if it would split a group."""
        name, size = _chosen("gbs", gbs, "policy.train_global_batch_size", self._global_batch_size)
        if size < 1:
            raise ValueError(f"{name}={size} must be positive")
        # Every rank steps by gbs / data_parallel rows, which must be full groups on each.
        if size % (self._data_parallel * rows_per_group):
            groups = f" x rows_per_group={rows_per_group}" if rows_per_group > 1 else ""
            raise ValueError(
                f"{name}={size} is not a multiple of data_parallel={self._data_parallel}{groups}"
            )
        return size

    def _check_training(
        self, data: BatchedDataDict, loss_fn: LossFunction, *, mbs: int | None
    ) -> None:
        """Raise unless the loss can be taken over the rows, in micro-batches of full groups."""
        rows_per_group = _group_size(loss_fn)
        if self._train_budget is not None:
            self._train_budget.refuse_size("mbs", mbs)
        else:
            mbs_name, rows = _chosen(
                "mbs", mbs, "policy.train_micro_batch_size", self._micro_batch_size
            )
            if rows % rows_per_group:
                raise ValueError(
                    f"{mbs_name}={rows} is not a multiple of rows_per_group={rows_per_group}: the "
                    "loss needs the rows of a group in one micro-batch"
                )
        check_training_batch(
            data,
            needs_token_mask=loss_fn.loss_type is LossType.TOKEN_LEVEL,
        )
        self._check_extent(data)
        if data.size % rows_per_group:
            raise ValueError(
                f"the batch has {data.size} rows, not a multiple of "
                f"rows_per_group={rows_per_group} of {type(loss_fn).__name__}"
            )

    def _check_extent(self, data: BatchedDataDict) -> None:
        if data.size == 0:
            raise ValueError("'input_ids' has no rows")
        if self._max_length is None:
            return
        lengths, width = data["input_lengths"], data["input_ids"].shape[1]
        row = int(lengths.argmax())
        limit = f"policy.max_total_sequence_length={self._max_length}"
        if lengths[row] > self._max_length:
            raise ValueError(f"'input_lengths'[{row}]={int(lengths[row])} is more than {limit}")
        if width > self._max_length:
            raise ValueError(f"'input_ids' is {width} tokens wide, padding included: over {limit}")


def plan_in_order(data: BatchedDataDict, *, data_parallel: int) -> list[ShardPlan]:
    """Return plans of consecutive rows that differ by at most a row, and may be empty."""
    return data.plan_by_batch_size(data_parallel, allow_uneven_shards=True)


def gather_scores(
    parts: Sequence[Mapping[str, torch.Tensor]],
    *,
    width: int,
    order: Sequence[int] | None = None,
) -> BatchedDataDict:
    """Return the scores of all shards in the caller's row order and width, as a copy.

    Args:
        parts: `[rows]` and `[rows, seq, ...]` tensors of each shard's rows, at most `width` wide.
        width: Columns of the caller's batch; missing ones are filled with 0.
        order: The caller's index of each row, shard by shard. None: rows are in order.
    """
    scores = BatchedDataDict.from_batches(parts)
    gathered = BatchedDataDict(
        {
            key: values if values.ndim == 1 else pad_right(values, width)
            for key, values in scores.items()
        }
    )
    return gathered if order is None else gathered.reorder_data(order)


def gather_generations(
    parts: Sequence[BatchedDataDict[GenerationOutputSpec]],
    *,
    pad_token_id: int,
    pad_values: Mapping[str, int] | None = None,
) -> BatchedDataDict[GenerationOutputSpec]:
    """Return the completions of all shards in order, padded to the longest.

    Args:
        parts: A `GenerationOutputSpec` per shard, of consecutive rows.
        pad_token_id: Pads `output_ids`; log-probabilities are padded with 0.
        pad_values: Pad other keys.
    """
    padding = {"output_ids": pad_token_id, **(pad_values or {})}
    return BatchedDataDict.from_batches(parts, pad_value_dict=padding)


def merge_train_results(results: Sequence[WorkerTrainOutputSpec]) -> TrainOutputSpec:
    """Return the result of `Policy.train` from those of the data-parallel ranks.

    Example, two ranks with one and two micro-batches:
        [{"all_mb_metrics": {"lr": [1.0]}, ...}, {"all_mb_metrics": {"lr": [1.0, 1.0]}, ...}]
        -> {"all_mb_metrics": {"lr": [1.0, 1.0, 1.0]}, ...}

    Args:
        results: In rank order; `global_loss` and `grad_norm` are the same on all of them.
    """
    # Loss and norm are all-reduced by the workers; metrics are of each rank's own micro-batches.
    first = results[0]
    metrics: dict[str, list[float]] = {}
    for result in results:
        for name, values in result["all_mb_metrics"].items():
            metrics.setdefault(name, []).extend(values)
    grad_norm = first["grad_norm"]
    return {
        "loss": _float32(first["global_loss"]),
        "grad_norm": None if grad_norm is None else _float32(grad_norm),
        "all_mb_metrics": metrics,
    }


def _group_size(loss_fn: LossFunction) -> int:
    """Return the `rows_per_group` of a loss; raise if it is not positive."""
    rows_per_group: int = getattr(loss_fn, "rows_per_group", 1)
    if rows_per_group < 1:
        raise ValueError(f"rows_per_group={rows_per_group} of the loss must be positive")
    return rows_per_group


def _chosen(argument: str, given: int | None, key: str, configured: int) -> tuple[str, int]:
    """Return the name and value of the call's argument or, if it is None, of the config key."""
    return (key, configured) if given is None else (argument, given)


def _float32(values: torch.Tensor) -> torch.Tensor:
    # A copy, as a result of Ray is a read-only view of its object store.
    return torch.as_tensor(values, dtype=torch.float32).clone()
