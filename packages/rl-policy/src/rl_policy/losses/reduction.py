"""What all losses share: which tokens are targets, and sums over a global count.

A loss of a micro-batch is a sum divided by a count over the *global* batch, so that the values of
all micro-batches and data-parallel ranks add up to the loss of the batch. Metrics are built the
same way: they add up to numbers of the global batch.

Column 0 of every `[batch, seq]` tensor is dropped, as no position predicts the first token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


def require_keys(
    data: Mapping[str, torch.Tensor], reasons: Mapping[str, str], *, loss: str
) -> None:
    """Raise `ValueError` unless the batch has every key of `reasons`, which say what for."""
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

    Raises:
        ValueError: Its shape is not that of the log-probabilities.
    """
    values = data[key][:, 1:]
    if values.shape != logprobs.shape:
        raise ValueError(
            f"{key} has shape {tuple(data[key].shape)}, "
            f"the log-probabilities {(logprobs.shape[0], logprobs.shape[1] + 1)}"
        )
    return values


def masked_difference(left: torch.Tensor, right: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `left - right` at the targets and 0 elsewhere, where its exponential may overflow."""
    # A product with the mask would turn an infinity of a masked position into NaN.
    return torch.where(mask > 0, left - right, 0.0)


def share_of(values: torch.Tensor, weights: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over a global count; a global batch without targets gives 0."""
    return (values * weights).sum() / torch.as_tensor(count, device=values.device).clamp(min=1)


def as_numbers(
    metrics: Mapping[str, torch.Tensor], data: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return 0-d tensors as floats, and `num_valid_samples` of the micro-batch."""
    # One copy from the device, not one per metric.
    numbers = torch.stack([value.float() for value in metrics.values()]).tolist()
    num_valid_samples = int(data["sample_mask"].sum())
    return {**dict(zip(metrics, numbers, strict=True)), "num_valid_samples": num_valid_samples}
