"""What a batch must have before a policy touches it: errors that name key, row and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from rl_batched_data import verify_right_padding

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict


def check_scoring_batch(data: BatchedDataDict[Any], *, pad_token_id: int | None) -> None:
    """Raise unless `data` has right-padded `input_ids` with their `input_lengths`.

    Args:
        data: `input_ids` `[batch, seq]`, `input_lengths` `[batch]`, and what else there is.
        pad_token_id: The tokenizer's padding token, by which left padding is told.

    Raises:
        ValueError: Names the key, the row and the numbers.
    """
    verify_right_padding(data, pad_token_id=pad_token_id)
    data.check_sizes()


def check_training_batch(
    data: BatchedDataDict[Any], *, pad_token_id: int | None, needs_token_mask: bool
) -> None:
    """Raise unless `data` has the masks of a training batch too, and its widths agree.

    Args:
        data: What `check_scoring_batch` wants, `sample_mask` `[batch]`, and `token_mask`
            `[batch, seq]`.
        pad_token_id: See `check_scoring_batch`.
        needs_token_mask: Whether the loss is token-level; otherwise `token_mask` may be missing.

    Raises:
        ValueError: Names the key, the row and the numbers.
    """
    check_scoring_batch(data, pad_token_id=pad_token_id)
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
    """Return `value`, which a caller may leave out.

    Raises:
        ValueError: It is not positive.
    """
    if value is not None and value <= 0:
        raise ValueError(f"{name}={value} must be positive")
    return value
