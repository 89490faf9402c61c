"""Masked means over the global batch: what losses share, and the loss that is one, `NLLLoss`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from rl_interfaces import LossInput, LossType


@dataclass(kw_only=True, slots=True)
class NLLLoss:
    """The negative log-likelihood of the target tokens, averaged over all of them.

    The batch holds `token_mask` `[batch, seq]` and `sample_mask` `[batch]`.

    Example, one row with the target tokens of probability 0.5 and 0.25:
        (log 2 + log 4) / 2 = 1.04 nats per token
    """

    loss_type: LossType = field(default=LossType.TOKEN_LEVEL, init=False)
    input_type: ClassVar[LossInput] = LossInput.LOGPROBS
    uses_sampling_temperature: ClassVar[bool] = False

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the micro-batch's share of the loss, and its metrics.

        Returns:
            The 0-d loss in nats per token, and `nll` (the same number) and `num_valid_samples`.

        Raises:
            ValueError: The batch lacks a mask.
        """
        reasons = {"token_mask": "the target tokens", "sample_mask": "the valid samples"}
        require_keys(data, reasons, loss=type(self).__name__)
        loss = share_of(-next_token_logits[:, 1:], target_mask(data), global_valid_toks)
        return loss, with_samples({"nll": loss.detach()}, data)


def require_keys(
    data: Mapping[str, torch.Tensor], reasons: Mapping[str, str], *, loss: str
) -> None:
    """Raise `ValueError` with the reason, the value of `reasons`, if a key is not in the batch."""
    for key, reason in reasons.items():
        if key not in data:
            raise ValueError(f"{loss} needs the key {key!r} in the batch: {reason}")


def target_mask(data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the weights of the targets, `[batch, seq - 1]` float32; mostly 0 and 1."""
    return data["token_mask"][:, 1:].float() * data["sample_mask"].float()[:, None]


def weighted_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row over its targets, `[batch, 1]`; 0 for a row without any.

    Args:
        values: `[batch, seq - 1]`, 0 where there is no target.
        mask: The weights of the targets.
    """
    total = mask.sum(dim=1, keepdim=True)
    return (values * mask).sum(dim=1, keepdim=True) / torch.where(total > 0, total, 1.0)


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
    """Return `left - right` at the targets and 0 elsewhere, also where it is not finite."""
    # Not `* mask`: infinity times 0 is NaN.
    return torch.where(mask > 0, left - right, 0.0)


def share_of(values: torch.Tensor, weights: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over a global count; a global batch without targets gives 0.

    A value of weight 0 does not count, and has no gradient, even if it is not finite.
    """
    divisor = torch.as_tensor(count, device=values.device)
    counted = torch.where(weights != 0, values, 0.0) * weights
    return counted.sum() / torch.where(divisor > 0, divisor, 1)


def with_samples(
    metrics: Mapping[str, torch.Tensor], data: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the metrics and `num_valid_samples` of the micro-batch, 0-d tensors.

    They stay on the device: the worker reads those of all micro-batches at the end of the call.
    """
    # A row of a fractional weight counts as one: a worker drops the metrics of no valid sample.
    return {**metrics, "num_valid_samples": (data["sample_mask"] > 0).sum()}
