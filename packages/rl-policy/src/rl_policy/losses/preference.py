"""Losses over preference pairs: a chosen and a rejected completion of one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from rl_interfaces import LossInput, LossType

from rl_policy.losses.reduction import (
    as_numbers,
    masked_difference,
    require_keys,
    share_of,
    target_column,
    target_mask,
)

ROWS_PER_PAIR = 2


@dataclass(kw_only=True, slots=True)
class DPOLoss:
    """Direct preference optimization (Rafailov et al. 2023), with label smoothing.

    Row `2 i` of a batch is the chosen completion of pair `i`, row `2 i + 1` the rejected one. The
    implicit reward of a row is `beta` times the log-ratio of policy and reference, summed over its
    target tokens; with the margin `m = reward(chosen) - reward(rejected)` a pair costs

        -(1 - label_smoothing) * log sigmoid(m) - label_smoothing * log sigmoid(-m)

    Label smoothing is the share of pairs whose label is taken to be flipped (conservative DPO,
    Mitchell 2023).

    The batch holds `token_mask` and `reference_logprobs` `[batch, seq]`, and `sample_mask`
    `[batch]`, which is the same for both rows of a pair. `rows_per_group` asks a policy to keep the
    two rows of a pair on one rank and in one micro-batch.

    Example, one pair, `beta = 0.5`, summed log-ratios +2 (chosen) and -1 (rejected):
        m = 0.5 * (2 - (-1)) = 1.5
        loss = -log sigmoid(1.5) = log(1 + exp(-1.5)) = 0.2014
        with label_smoothing = 0.1: 0.9 * 0.2014 + 0.1 * 1.7014 = 0.3514

    Attributes:
        beta: Strength of the tie to the reference, above 0; the reward's unit per nat.
        label_smoothing: In [0, 0.5).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: LossType = field(default=LossType.SEQUENCE_LEVEL, init=False)
    input_type: ClassVar[LossInput] = LossInput.LOGPROBS
    rows_per_group: ClassVar[int] = ROWS_PER_PAIR

    def __post_init__(self) -> None:
        """Raise `ValueError`, naming the argument, if a value is out of its range."""
        if self.beta <= 0:
            raise ValueError(f"beta={self.beta} must be positive")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing={self.label_smoothing} must lie in [0, 0.5)")

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the micro-batch's share of the loss, and its metrics.

        Args:
            next_token_logits: `[batch, seq]` float32 token log-probabilities, an even number of
                rows.
            data: The micro-batch, see the class.
            global_valid_seqs: 0-d; valid rows of the global batch, twice its pairs.
            global_valid_toks: 0-d; not read.

        Returns:
            The 0-d loss in nats per pair, and floats that add up over micro-batches to means over
            pairs: `reward_margin`, `chosen_reward`, `rejected_reward`, `pair_accuracy` (share of
            pairs with a positive margin), and the count `num_valid_samples`.

        Raises:
            ValueError: The batch lacks a column, or does not consist of pairs.
        """
        reasons = {
            "token_mask": "the target tokens",
            "sample_mask": "the valid samples",
            "reference_logprobs": "the log-probabilities of the reference model",
        }
        require_keys(data, reasons, loss=type(self).__name__)
        is_valid = _valid_pairs(data["sample_mask"])
        rewards = self.beta * _log_ratios(next_token_logits[:, 1:], data)
        chosen, rejected = rewards.view(-1, ROWS_PER_PAIR).unbind(dim=1)
        margin = chosen - rejected
        cost = -(1 - self.label_smoothing) * F.logsigmoid(margin)
        if self.label_smoothing:
            cost = cost - self.label_smoothing * F.logsigmoid(-margin)
        measured = {
            "reward_margin": margin,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "pair_accuracy": (margin > 0).float(),
        }
        num_pairs = global_valid_seqs / ROWS_PER_PAIR
        shares = {
            name: share_of(values.detach(), is_valid, num_pairs)
            for name, values in measured.items()
        }
        return share_of(cost, is_valid, num_pairs), as_numbers(shares, data)


def _valid_pairs(sample_mask: torch.Tensor) -> torch.Tensor:
    """Return `[pairs]` float32, 1 where both rows of a pair are valid."""
    if sample_mask.shape[0] % ROWS_PER_PAIR:
        raise ValueError(
            f"DPOLoss got {sample_mask.shape[0]} rows, which are no pairs: rows 2 i and 2 i + 1 "
            "are the chosen and the rejected completion of one prompt"
        )
    chosen, rejected = sample_mask.float().view(-1, ROWS_PER_PAIR).unbind(dim=1)
    if not torch.equal(chosen, rejected):
        raise ValueError("sample_mask differs between the two rows of a pair: mask both or neither")
    return chosen


def _log_ratios(logprobs: torch.Tensor, data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return `[batch]`, log(policy / reference) of each row's target tokens together."""
    reference = target_column(data, "reference_logprobs", logprobs)
    return masked_difference(logprobs, reference, target_mask(data)).sum(dim=1)
