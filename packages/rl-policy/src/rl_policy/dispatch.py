"""A batch on its way to the ranks and back: checked, shared out, put together. No Ray here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rl_batched_data import BatchedDataDict, pad_right
from rl_interfaces import LossType
from rl_interfaces.backend.batch_checks import check_scoring_batch, check_training_batch

if TYPE_CHECKING:
    from rl_interfaces import LossFunction


def check_batch(
    data: BatchedDataDict[Any], *, pad_token_id: int | None, max_length: int | None
) -> None:
    """Raise unless every row of `data` can be scored, before anything is sent.

    Args:
        data: `input_ids` `[batch, seq]`, `input_lengths` `[batch]`, and what else there is.
        pad_token_id: The tokenizer's padding token, by which left padding is told.
        max_length: Most tokens per row, `policy.max_total_sequence_length`. None: any.

    Raises:
        ValueError: Names the key, the row and the numbers.
    """
    check_scoring_batch(data, pad_token_id=pad_token_id)
    _check_size(data, max_length=max_length)


def check_prompts(
    data: BatchedDataDict[Any], *, pad_token_id: int | None, max_length: int | None
) -> None:
    """Raise unless every row of `data` can be continued by a token, before anything is sent.

    Args:
        data: See `check_batch`.
        pad_token_id: See `check_batch`.
        max_length: Most tokens per row, prompt and completion.

    Raises:
        ValueError: Names the key, the row and the numbers.
    """
    check_batch(data, pad_token_id=pad_token_id, max_length=max_length)
    row = int(data["input_lengths"].argmax())
    if max_length is not None and data["input_lengths"][row] >= max_length:
        raise ValueError(
            f"'input_lengths'[{row}]={int(data['input_lengths'][row])} leaves no room for a token "
            f"in policy.max_total_sequence_length={max_length}"
        )


def check_train_batch(
    data: BatchedDataDict[Any],
    loss_fn: LossFunction,
    *,
    pad_token_id: int | None,
    max_length: int | None,
) -> None:
    """Raise unless `data` can be trained on with `loss_fn`, before anything is sent.

    Args:
        data: What `check_batch` wants, `sample_mask` `[batch]`, and `token_mask` `[batch, seq]`
            where the loss is token-level.
        loss_fn: The loss.
        pad_token_id: See `check_batch`.
        max_length: See `check_batch`.

    Raises:
        ValueError: Names the key, the row and the numbers.
    """
    check_training_batch(
        data,
        pad_token_id=pad_token_id,
        needs_token_mask=loss_fn.loss_type is LossType.TOKEN_LEVEL,
    )
    _check_size(data, max_length=max_length)


def check_global_batch_size(gbs: int, *, data_parallel: int, name: str) -> None:
    """Raise `ValueError` unless every data-parallel rank gets the same part of a global batch.

    Args:
        gbs: Samples per optimizer step.
        data_parallel: Data-parallel ranks.
        name: How the error calls `gbs`.
    """
    if gbs < 1:
        raise ValueError(f"{name}={gbs} must be positive")
    if gbs % data_parallel:
        raise ValueError(f"{name}={gbs} is not a multiple of data_parallel={data_parallel}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatching:
    """The token budget by which micro-batches are planned."""

    key: str
    """Its name in the config, for example `policy.sequence_packing.train_mb_tokens`."""
    arguments: dict[str, Any]
    """What `shard_by_batch_size` takes."""

    @classmethod
    def of(cls, config: Mapping[str, Any], budget: str) -> MicroBatching | None:
        """Return what a resolved policy config asks for; None where micro-batches have one size.

        Args:
            config: A resolved policy config.
            budget: `train_mb_tokens` or `logprob_mb_tokens`.
        """
        dynamic, packing = config["dynamic_batching"], config["sequence_packing"]
        if dynamic["enabled"]:
            arguments: dict[str, Any] = {
                "max_tokens_per_microbatch": dynamic[budget],
                "sequence_length_round": dynamic["sequence_length_round"],
            }
            return cls(
                key=f"policy.dynamic_batching.{budget}",
                arguments={"dynamic_batching_args": arguments},
            )
        if packing["enabled"]:
            arguments = {
                "max_tokens_per_microbatch": packing[budget],
                "algorithm": packing["algorithm"],
                "sequence_length_pad_multiple": config["make_sequence_length_divisible_by"],
            }
            return cls(
                key=f"policy.sequence_packing.{budget}",
                arguments={"sequence_packing_args": arguments},
            )
        return None

    def refuse_size(self, name: str, size: int | None) -> None:
        """Raise `ValueError` if a call gives micro-batches a size beside the budget."""
        if size is not None:
            raise ValueError(
                f"{name}={size} contradicts {self.key}, which decides how many rows a "
                "micro-batch has"
            )

    def shard(
        self, data: BatchedDataDict[Any], *, data_parallel: int, batch_size: int | None = None
    ) -> tuple[list[BatchedDataDict[Any]], list[int]]:
        """Return the shards, which carry their plan, and the order of all shards' rows.

        Raises:
            ValueError: A row is longer than a micro-batch, or the packer is unknown.
        """
        try:
            shards, order = data.shard_by_batch_size(
                data_parallel, batch_size=batch_size, allow_uneven_shards=True, **self.arguments
            )
        except ValueError as error:
            raise ValueError(f"{self.key}: {error}") from error
        return [*shards], order


def shard_for_training(
    data: BatchedDataDict[Any],
    *,
    data_parallel: int,
    gbs: int,
    micro_batching: MicroBatching | None = None,
) -> list[BatchedDataDict[Any]]:
    """Return the rows of each data-parallel rank: its part of every global batch.

    The last global batch may be short; a rank may then have one row less than another, or none.

    Raises:
        ValueError: A row is longer than a micro-batch.
    """
    if micro_batching is not None:
        return micro_batching.shard(data, data_parallel=data_parallel, batch_size=gbs)[0]
    return [*data.shard_by_batch_size(data_parallel, batch_size=gbs, allow_uneven_shards=True)]


def shard_for_scoring(
    data: BatchedDataDict[Any],
    *,
    data_parallel: int,
    micro_batching: MicroBatching | None = None,
) -> tuple[list[BatchedDataDict[Any]], list[int] | None]:
    """Return the rows of each data-parallel rank, and the order of all of them.

    The order is None where it is the caller's. A rank may have no rows.

    Raises:
        ValueError: A row is longer than a micro-batch.
    """
    if micro_batching is not None:
        return micro_batching.shard(data, data_parallel=data_parallel)
    return shard_in_order(data, data_parallel=data_parallel), None


def shard_in_order(data: BatchedDataDict[Any], *, data_parallel: int) -> list[BatchedDataDict[Any]]:
    """Return consecutive parts of `data` that differ by at most a row, and may be empty."""
    return [*data.shard_by_batch_size(data_parallel, allow_uneven_shards=True)]


def gather_scores(
    parts: Sequence[Mapping[str, Any]], *, width: int, order: Sequence[int] | None = None
) -> BatchedDataDict[Any]:
    """Return the scores of all parts, in the caller's order and width, in memory of its own.

    Args:
        parts: `[rows]` and `[rows, seq, ...]` tensors of each shard's rows, at most `width` wide.
        width: Columns of the caller's batch; what is missing is filled with 0.
        order: Where the rows of all parts stood in the caller's batch. None: where they stand.
    """
    scores: BatchedDataDict[Any] = BatchedDataDict.from_batches(parts)
    gathered: BatchedDataDict[Any] = BatchedDataDict(
        {
            key: values if values.ndim == 1 else pad_right(values, width)
            for key, values in scores.items()
        }
    )
    return gathered if order is None else gathered.reorder_data(order)


def gather_generations(
    parts: Sequence[Mapping[str, Any]], *, pad_token_id: int
) -> BatchedDataDict[Any]:
    """Return the completions of all parts, in order, as wide as the widest.

    Args:
        parts: `GenerationOutputSpec` of consecutive rows.
        pad_token_id: Fills up `output_ids`; log-probabilities are filled up with 0.
    """
    return BatchedDataDict.from_batches(parts, pad_value_dict={"output_ids": pad_token_id})


def merge_train_results(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what `Policy.train` returns, from what the data-parallel ranks returned.

    Example, two ranks with one and two micro-batches:
        [{"all_mb_metrics": {"lr": [1.0]}, ...}, {"all_mb_metrics": {"lr": [1.0, 1.0]}, ...}]
        -> {"all_mb_metrics": {"lr": [1.0, 1.0, 1.0]}, ...}

    Args:
        results: In rank order; `global_loss` and `grad_norm` are the same on all of them.
    """
    first = results[0]
    metrics: dict[str, list[Any]] = {}
    for result in results:
        for name, values in result["all_mb_metrics"].items():
            metrics.setdefault(name, []).extend(values)
    grad_norm = first["grad_norm"]
    return {
        "loss": _float32(first["global_loss"]),
        "grad_norm": None if grad_norm is None else _float32(grad_norm),
        "all_mb_metrics": metrics,
    }


def _check_size(data: BatchedDataDict[Any], *, max_length: int | None) -> None:
    if data.size == 0:
        raise ValueError("'input_ids' has no rows")
    if max_length is None:
        return
    lengths, width = data["input_lengths"], data["input_ids"].shape[1]
    row = int(lengths.argmax())
    limit = f"policy.max_total_sequence_length={max_length}"
    if lengths[row] > max_length:
        raise ValueError(f"'input_lengths'[{row}]={int(lengths[row])} is more than {limit}")
    if width > max_length:
        raise ValueError(f"'input_ids' is {width} tokens wide, padding included: over {limit}")


def _float32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float32).clone()
