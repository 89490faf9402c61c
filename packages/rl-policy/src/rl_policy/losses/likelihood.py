"""The negative log-likelihood."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from rl_interfaces import LossInput, LossType

from rl_policy.losses.reduction import require_keys, share_of, target_mask, with_samples


@dataclass(kw_only=True, slots=True)
class NLLLoss:
    """The negative log-likelihood of the target tokens, averaged over all of them.

    The batch holds `token_mask` `[batch, seq]` and `sample_mask` `[batch]`.

    Example, one row with the target tokens of probability 0.5 and 0.25:
        (log 2 + log 4) / 2 = 1.04 nats per token
    """

    loss_type: LossType = field(default=LossType.TOKEN_LEVEL, init=False)
    input_type: ClassVar[LossInput] = LossInput.LOGPROBS

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
