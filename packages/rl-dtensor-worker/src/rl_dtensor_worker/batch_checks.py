"""What a batch must have before a worker touches it: errors that name key, row and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from rl_batched_data.padding import verify_right_padding

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict

_MATRIX = 2


def check_scoring_batch(data: BatchedDataDict[Any], *, pad_token_id: int | None) -> None:
    """Raise `ValueError` unless `data` has right-padded `input_ids` with their `input_lengths`."""
    for key, ndim in (("input_ids", _MATRIX), ("input_lengths", 1)):
        if key not in data:
            raise ValueError(f"the batch has no {key}, only {sorted(data)}")
        value = data[key]
        if not isinstance(value, torch.Tensor) or value.ndim != ndim:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{key} must be a {ndim}-dimensional tensor, got {shape}")
    verify_right_padding(data, pad_token_id=pad_token_id)


def check_training_batch(
    data: BatchedDataDict[Any], *, pad_token_id: int | None, needs_token_mask: bool
) -> None:
    """Raise `ValueError` unless `data` has the masks too, and its shapes agree."""
    check_scoring_batch(data, pad_token_id=pad_token_id)
    if "sample_mask" not in data:
        raise ValueError("the batch has no sample_mask: [batch], 1 for each row that counts")
    if needs_token_mask and "token_mask" not in data:
        raise ValueError(
            "the batch has no token_mask, which a token-level loss needs: "
            "[batch, seq], 1 for each token that is a target"
        )
    num_rows, width = data["input_ids"].shape
    for key, value in data.items():
        if not isinstance(value, torch.Tensor):
            continue
        too_wide = value.ndim == _MATRIX and value.shape[1] != width
        if value.shape[0] != num_rows or too_wide:
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}, input_ids has {(num_rows, width)}: "
                "rows, and the width of every two-dimensional tensor, must agree"
            )


def check_room(data: BatchedDataDict[Any], *, longest: int) -> None:
    """Raise `ValueError` unless every prompt leaves room for a new token in `longest` tokens."""
    full = (data["input_lengths"] >= longest).nonzero().flatten()
    if len(full):
        row = int(full[0])
        raise ValueError(
            f"input_lengths[{row}]={int(data['input_lengths'][row])} leaves no room for a new "
            f"token in {longest} tokens (policy.max_total_sequence_length, or the model's own)"
        )
