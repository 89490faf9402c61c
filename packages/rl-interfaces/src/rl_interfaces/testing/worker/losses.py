"""The losses that the kit trains with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_interfaces.loss import LossInput, LossType

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class LogprobLoss:
    """The mean negative log-probability of the target tokens."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.LOGPROBS

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the micro-batch's share, see `LossFunction`."""
        per_token = self.loss_type is LossType.TOKEN_LEVEL
        count = global_valid_toks if per_token else global_valid_seqs
        return _mean(next_token_logits[:, 1:], data, count)


class SequenceLoss(LogprobLoss):
    """The negative log-probability of the target tokens, summed over each sequence; their mean."""

    loss_type = LossType.SEQUENCE_LEVEL


class LogitLoss:
    """The same from logits."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.LOGITS

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the micro-batch's share, see `LossFunction`."""
        logprobs = next_token_logits[:, :-1].float().log_softmax(-1)
        chosen = logprobs.gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
        return _mean(chosen, data, global_valid_toks)


class InfiniteLoss(LogprobLoss):
    """A loss whose gradients are not finite."""

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the micro-batch's share times infinity."""
        loss, metrics = super().__call__(
            next_token_logits, data, global_valid_seqs, global_valid_toks
        )
        return loss * float("inf"), metrics


def _mean(
    logprobs: torch.Tensor, data: Mapping[str, Any], count: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    loss = -(logprobs * mask).sum() / count
    return loss, {"num_valid_samples": int(data["sample_mask"].sum())}
