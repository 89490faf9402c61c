"""Masks and sums of losses: the target tokens of a batch, and shares of a global mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def require_keys(
    data: Mapping[str, torch.Tensor], reasons: Mapping[str, str], *, loss: str
) -> None:
    """Raise `ValueError` with the reason, the value of `reasons`, if a key is not in the batch."""
    for key, reason in reasons.items():
        if key not in data:
            raise ValueError(f"{loss} needs the key {key!r} in the batch: {reason}")


def target_mask(data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return `[batch, seq - 1]` float32, 1 at the target tokens of valid samples."""
    return data["token_mask"][:, 1:].float() * data["sample_mask"].float()[:, None]


def target_column(
    data: Mapping[str, torch.Tensor], key: str, logprobs: torch.Tensor
) -> torch.Tensor:
    """Return `data[key]` without column 0, `[batch, seq - 1]`.

    Args:
        data: The batch.
        key: Of a column `[batch, seq]`.
        logprobs: What the loss is called with for each token but the first, `[batch, seq - 1]`.

    Raises:
        ValueError: Its shape is not that of what the loss is called with.
    """
    values = data[key][:, 1:]
    if values.shape != logprobs.shape:
        raise ValueError(
            f"{key} has shape {tuple(data[key].shape)}, what the loss is called with "
            f"{(logprobs.shape[0], logprobs.shape[1] + 1)}"
        )
    return values


def masked_difference(left: torch.Tensor, right: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `left - right` at the targets and 0 elsewhere, where its `exp` could overflow."""
    # Not `* mask`: infinity times 0 is NaN.
    return torch.where(mask > 0, left - right, 0.0)


def share_of(values: torch.Tensor, weights: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over a global count; a global batch without targets gives 0."""
    return (values * weights).sum() / torch.as_tensor(count, device=values.device).clamp(min=1)


def with_samples(
    metrics: Mapping[str, torch.Tensor], data: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the metrics and `num_valid_samples` of the micro-batch, 0-d tensors.

    They stay on the device: the worker reads those of all micro-batches at the end of the call.
    """
    return {**metrics, "num_valid_samples": data["sample_mask"].sum().long()}
