"""Losses on preferences: pairs of a chosen and a rejected completion of one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from rl_interfaces import LossInput, LossType

from rl_policy.losses.reduction import (
    masked_difference,
    require_keys,
    share_of,
    target_column,
    with_samples,
)

ROWS_PER_PAIR = 2


@dataclass(kw_only=True, slots=True)
class DPOLoss:
    """Direct preference optimization (Rafailov et al. 2023), with label smoothing.

    Row `2 i` of a batch is the chosen completion of pair `i`, row `2 i + 1` the rejected one. The
    implicit reward of a row is `beta` times the log-ratio of policy and reference, summed over its
    target tokens; with the margin `m = reward(chosen) - reward(rejected)` a pair costs

        -(1 - label_smoothing) * log sigmoid(m) - label_smoothing * log sigmoid(-m)

    Label smoothing is the assumed fraction of pairs with a flipped label (conservative DPO,
    Mitchell 2023).

    The batch holds `token_mask` and `reference_logprobs` `[batch, seq]`, and `sample_mask`
    `[batch]`, which is the same for both rows of a pair. `rows_per_group` asks a policy to keep the
    two rows of a pair on one rank and in one micro-batch.

    Example, one pair, `beta = 0.5`, summed log-ratios +2 (chosen) and -1 (rejected):
        m = 0.5 * (2 - (-1)) = 1.5
        loss = -log sigmoid(1.5) = log(1 + exp(-1.5)) = 0.2014
        with label_smoothing = 0.1: 0.9 * 0.2014 + 0.1 * 1.7014 = 0.3514

    Attributes:
        beta: Coefficient of the implicit KL constraint, above 0: reward per nat of log-ratio.
        label_smoothing: In [0, 0.5).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: LossType = field(default=LossType.SEQUENCE_LEVEL, init=False)
    input_type: ClassVar[LossInput] = LossInput.LOGPROBS
    uses_sampling_temperature: ClassVar[bool] = False
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
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the micro-batch's share of the loss, and its metrics.

        Returns:
            The 0-d loss in nats per pair, and 0-d tensors that add up over micro-batches to means
            over pairs: `reward_margin`, `chosen_reward`, `rejected_reward`, `pair_accuracy`
            (fraction of pairs with a positive margin), and the count `num_valid_samples`.

        Raises:
            ValueError: The batch lacks a column, or does not consist of pairs.
        """
        reasons = {
            "token_mask": "the target tokens",
            "sample_mask": "the valid samples",
            "reference_logprobs": "the log-probabilities of the reference model",
        }
        require_keys(data, reasons, loss=type(self).__name__)
        is_valid = _valid_pairs(data["sample_mask"], loss=type(self).__name__)
        rewards = self.beta * _log_ratios(next_token_logits[:, 1:], data)
        chosen, rejected = rewards.view(-1, ROWS_PER_PAIR).unbind(dim=1)
        margin = chosen - rejected
        cost = -(1 - self.label_smoothing) * F.logsigmoid(margin)
        if self.label_smoothing:
            cost = cost - self.label_smoothing * F.logsigmoid(-margin)
        return _share_of_pairs(cost, chosen, rejected, is_valid, data, global_valid_seqs)


@dataclass(kw_only=True, slots=True)
class PreferenceLoss:
    """The loss of a reward model on preferences (Bradley and Terry 1952; Ouyang et al. 2022).

    Rows are those of `DPOLoss`. With the margin `m = score(chosen) - score(rejected)` a pair costs

        -log sigmoid(m) + center_coef * (score(chosen) + score(rejected)) ** 2

    The second term keeps scores around zero, which their differences leave free (Eisenstein et al.
    2023).

    The batch holds `sample_mask` `[batch]`, the same for both rows of a pair. The policy has
    `head: reward`, whose score of each row, `[batch]` float32, is what the loss is called with.

    Example, one pair, scores 2 (chosen) and 0.5 (rejected), `center_coef = 0.01`:
        -log sigmoid(1.5) + 0.01 * 2.5 ** 2 = 0.2014 + 0.0625 = 0.2639

    Attributes:
        center_coef: Not negative, per squared unit of score.
    """

    center_coef: float = 0.0
    loss_type: LossType = field(default=LossType.SEQUENCE_LEVEL, init=False)
    input_type: ClassVar[LossInput] = LossInput.LOGITS
    uses_sampling_temperature: ClassVar[bool] = False
    rows_per_group: ClassVar[int] = ROWS_PER_PAIR

    def __post_init__(self) -> None:
        """Raise `ValueError`, naming the argument, if a value is out of its range."""
        if self.center_coef < 0:
            raise ValueError(f"center_coef={self.center_coef} must not be negative")

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the micro-batch's share of the loss, and its metrics.

        Returns:
            The 0-d loss per pair, and the metrics of `DPOLoss`, whose rewards are the scores here.

        Raises:
            ValueError: The batch lacks a column, does not consist of pairs, or has no scores.
        """
        name = type(self).__name__
        require_keys(data, {"sample_mask": "the valid samples"}, loss=name)
        is_valid = _valid_pairs(data["sample_mask"], loss=name)
        if next_token_logits.ndim != 1:
            raise ValueError(
                f"{name} needs a score for each row, [batch], and got "
                f"{tuple(next_token_logits.shape)}: set policy.head='reward'"
            )
        chosen, rejected = next_token_logits.view(-1, ROWS_PER_PAIR).unbind(dim=1)
        cost = -F.logsigmoid(chosen - rejected)
        if self.center_coef:
            cost = cost + self.center_coef * (chosen + rejected) ** 2
        return _share_of_pairs(cost, chosen, rejected, is_valid, data, global_valid_seqs)


def _share_of_pairs(
    cost: torch.Tensor,
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    is_valid: torch.Tensor,
    data: Mapping[str, torch.Tensor],
    global_valid_seqs: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the metrics of pairs, `[pairs]` each, as shares of the global batch."""
    margin = chosen - rejected
    measured = {
        "reward_margin": margin,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "pair_accuracy": (margin > 0).float(),
    }
    # Valid rows are counted, chosen and rejected ones.
    num_pairs = global_valid_seqs / ROWS_PER_PAIR
    shares = {
        name: share_of(values.detach(), is_valid, num_pairs) for name, values in measured.items()
    }
    return share_of(cost, is_valid, num_pairs), with_samples(shares, data)


def _valid_pairs(sample_mask: torch.Tensor, *, loss: str) -> torch.Tensor:
    """Return `[pairs]` float32, 1 where both rows of a pair are valid."""
    if sample_mask.shape[0] % ROWS_PER_PAIR:
        raise ValueError(
            f"{loss} got {sample_mask.shape[0]} rows, which are no pairs: rows 2 i and 2 i + 1 "
            "are the chosen and the rejected completion of one prompt"
        )
    chosen, rejected = sample_mask.float().view(-1, ROWS_PER_PAIR).unbind(dim=1)
    if not torch.equal(chosen, rejected):
        raise ValueError("sample_mask differs between the two rows of a pair: mask both or neither")
    return chosen


def _log_ratios(logprobs: torch.Tensor, data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return `[batch]`, the sum of log(policy / reference) over each row's target tokens.

    A fractional token mask weighs them. `sample_mask` weighs the pair, and not its log-ratios.
    """
    reference = target_column(data, "reference_logprobs", logprobs)
    weights = data["token_mask"][:, 1:].float()
    is_valid = (data["sample_mask"] > 0)[:, None]
    return (masked_difference(logprobs, reference, weights * is_valid) * weights).sum(dim=1)
