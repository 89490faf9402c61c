"""Batches and losses that the kit runs a worker with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.loss import LossInput, LossType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_interfaces.testing.worker.oracle import Columns

_NUM_PROMPT_TOKENS = 2
"""Leading tokens that are no targets, in rows that are longer."""


def make_columns(
    lengths: Sequence[int], *, tokens: Sequence[int], pad: int, width: int | None = None, seed: int
) -> Columns:
    """Return right-padded rows of random tokens.

    The first tokens of each row are no targets, and every fourth row does not count.

    Args:
        lengths: Tokens of each row.
        tokens: The ids to draw from.
        pad: The id beyond a row's end.
        width: Columns; as many as the longest row has where None.
        seed: Of the draw.
    """
    sizes = torch.tensor(lengths)
    positions = torch.arange(width or int(sizes.max()))
    generator = torch.Generator().manual_seed(seed)
    shape = (len(sizes), len(positions))
    drawn = torch.tensor(tokens)[torch.randint(len(tokens), shape, generator=generator)]
    inside = positions < sizes[:, None]
    row_id = torch.arange(len(sizes))
    return {
        "input_ids": torch.where(inside, drawn, torch.tensor(pad)),
        "input_lengths": sizes,
        "token_mask": (inside & (positions >= _NUM_PROMPT_TOKENS)).float(),
        "sample_mask": (row_id % 4 != 1).float(),
        "row_id": row_id,
    }


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
