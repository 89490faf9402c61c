"""A batch on its way to the ranks and back: checked, shared out, put together. No Ray here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rl_batched_data import BatchedDataDict, pad_right
from rl_batched_data.batch_checks import check_scoring_batch, check_training_batch
from rl_interfaces import LossType

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


def shard_for_training(
    data: BatchedDataDict[Any], *, data_parallel: int, gbs: int
) -> list[BatchedDataDict[Any]]:
    """Return the rows of each data-parallel rank: its part of every global batch.

    The last global batch may be short; a rank may then have one row less than another, or none.
    """
    return [*data.shard_by_batch_size(data_parallel, batch_size=gbs, allow_uneven_shards=True)]


def shard_in_order(data: BatchedDataDict[Any], *, data_parallel: int) -> list[BatchedDataDict[Any]]:
    """Return consecutive parts of `data` that differ by at most a row, and may be empty."""
    return [*data.shard_by_batch_size(data_parallel, allow_uneven_shards=True)]


def gather_scores(parts: Sequence[Mapping[str, Any]], *, width: int) -> BatchedDataDict[Any]:
    """Return the scores of all parts, in order, in the caller's width and in memory of its own.

    Args:
        parts: `[rows, seq]` tensors of consecutive rows, each at most `width` wide.
        width: Columns of the caller's batch; what is missing is filled with 0.
    """
    scores: BatchedDataDict[Any] = BatchedDataDict.from_batches(parts)
    return BatchedDataDict({key: pad_right(scores[key], width) for key in scores})


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
