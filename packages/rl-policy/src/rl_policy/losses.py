"""Losses over token log-probabilities, and the advantages that the policy gradient weighs them by.

All implement `rl_interfaces.LossFunction`, which describes the arguments of a call, on token
log-probabilities `[batch, seq]` float32; `PreferenceLoss` alone is on scores `[batch]`. The loss of
a micro-batch is a sum divided by a count over the *global* batch, so that the values of all
micro-batches and data-parallel ranks add up to the loss of the batch. Metrics are normalised the
same way: summed, they are means over the global batch.

Column 0 of every `[batch, seq]` tensor is dropped, as no position predicts the first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from rl_interfaces import LossInput, LossType

__all__ = ["ClippedPGLoss", "DPOLoss", "NLLLoss", "PreferenceLoss", "group_relative_advantages"]

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group, in units of reward."""
ROWS_PER_PAIR = 2


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
        _require_keys(data, reasons, loss=type(self).__name__)
        loss = _share_of(-next_token_logits[:, 1:], _target_mask(data), global_valid_toks)
        return loss, _with_samples({"nll": loss.detach()}, data)


@dataclass(kw_only=True, slots=True)
class ClippedPGLoss:
    """The clipped policy-gradient loss of PPO, with the terms of GRPO and its successors.

    With the ratio `r = exp(logprob - prev_logprob)` and the advantage `A`, a token costs

        -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k3

    - clipped surrogate: PPO (Schulman et al. 2017); unequal bounds are "clip-higher" of DAPO (Yu et
      al. 2025);
    - `dual_clip`: where `A < 0` the first term is at most `dual_clip * |A|` (Ye et al. 2020);
    - `k3 = exp(d) - d - 1` with `d = reference_logprob - logprob`: the non-negative estimator of
      KL(policy || reference) (Schulman 2020), as a penalty in the loss: GRPO (Shao et al. 2024);
    - `w = min(exp(prev_logprob - generation_logprob), importance_cap)`: truncated importance
      sampling (Ionides 2008), which corrects for the mismatch between sampler and trainer.

    The batch holds `token_mask`, `advantages` and `prev_logprobs` `[batch, seq]`, `sample_mask`
    `[batch]`, `reference_logprobs` `[batch, seq]` if `kl_coef > 0`, and `generation_logprobs`
    `[batch, seq]` if `importance_cap` is set. If present, the last two are reported as metrics even
    when the loss does not need them.

    Example, one row with one target token, `clip_low = clip_high = 0.2`:
        logprob = log 0.6, prev_logprob = log 0.4: r = 1.5
        A = +1: -min(1.5, 1.2)   = -1.2, clipped: no gradient
        A = -1: -min(-1.5, -1.2) =  1.5, not clipped; with dual_clip = 1.4 it is 1.4, no gradient

    Attributes:
        clip_low: The ratio is clipped to at least `1 - clip_low`; in [0, 1).
        clip_high: The ratio is clipped to at most `1 + clip_high`; not negative.
        dual_clip: Upper bound of the cost per unit of negative advantage, above 1. None: no bound.
        kl_coef: Coefficient of the KL penalty, not negative.
        importance_cap: Truncation of the importance weight, at least 1. None: no correction.
        loss_type: `TOKEN_LEVEL`: the mean over all tokens (DAPO). `SEQUENCE_LEVEL`: the mean over
            sequences of their token means (GRPO). Or the enum's value, as in YAML.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    importance_cap: float | None = None
    loss_type: LossType = LossType.TOKEN_LEVEL
    input_type: ClassVar[LossInput] = LossInput.LOGPROBS

    def __post_init__(self) -> None:
        """Raise `ValueError`, naming the argument, if a value is out of its range."""
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"clip_low={self.clip_low} must lie in [0, 1)")
        if self.clip_high < 0:
            raise ValueError(f"clip_high={self.clip_high} must not be negative")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip} must be greater than 1")
        if self.kl_coef < 0:
            raise ValueError(f"kl_coef={self.kl_coef} must not be negative")
        if self.importance_cap is not None and self.importance_cap < 1:
            raise ValueError(f"importance_cap={self.importance_cap} must be at least 1")
        self.loss_type = LossType(self.loss_type)

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the micro-batch's share of the loss, and its metrics.

        Returns:
            The 0-d loss, and 0-d tensors that add up over micro-batches: `policy_loss`, `kl` (k3
            per token, with a reference), `entropy` (per token, estimated as the negative
            log-probability of the sampled tokens), `clip_fraction` (fraction of tokens whose
            gradient is zero because of clipping), `probs_ratio` (mean of r),
            `sampler_trainer_ratio` (mean of `exp(prev_logprob - generation_logprob)`, if the batch
            has the latter; 1 if sampler and trainer agree), and `num_valid_samples`.

        Raises:
            ValueError: The batch lacks a column, or its shape is wrong.
        """
        self._require_keys(data)
        mask = _target_mask(data)
        counts = (global_valid_seqs, global_valid_toks)
        policy_cost, kl, metrics = self._token_terms(next_token_logits[:, 1:], data, mask)
        cost = policy_cost if kl is None else policy_cost + self.kl_coef * kl
        shares = {
            name: _share_of(values.detach(), mask, global_valid_toks)
            for name, values in metrics.items()
        }
        shares["policy_loss"] = self._reduce(policy_cost.detach(), mask, *counts)
        return self._reduce(cost, mask, *counts), _with_samples(shares, data)

    def _token_terms(
        self, logprobs: torch.Tensor, data: Mapping[str, torch.Tensor], mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
        """Return policy cost, KL (None without a reference) and measures, `[batch, seq - 1]`."""
        prev = _target_column(data, "prev_logprobs", logprobs)
        ratio = _masked_difference(logprobs, prev, mask).exp()
        cost, is_clipped = self._clipped_cost(ratio, _target_column(data, "advantages", logprobs))
        metrics = {"clip_fraction": is_clipped.float(), "probs_ratio": ratio, "entropy": -logprobs}
        if "generation_logprobs" in data:
            sampler = _target_column(data, "generation_logprobs", logprobs)
            weight = _masked_difference(prev, sampler, mask).exp()
            metrics["sampler_trainer_ratio"] = weight
            if self.importance_cap is not None:
                cost = cost * weight.clamp(max=self.importance_cap)
        if "reference_logprobs" not in data:
            return cost, None, metrics
        log_ratio = _masked_difference(
            _target_column(data, "reference_logprobs", logprobs), logprobs, mask
        )
        metrics["kl"] = torch.expm1(log_ratio) - log_ratio
        return cost, metrics["kl"], metrics

    def _clipped_cost(
        self, ratio: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cost of each token, and where a bound sets its gradient to zero."""
        # Strictly greater: where both costs are equal, as at advantage 0, nothing is clipped.
        free = -ratio * advantages
        bounded = -ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        cost, is_clipped = torch.maximum(free, bounded), bounded > free
        if self.dual_clip is not None:
            ceiling = self.dual_clip * advantages.abs()
            # The ceiling acts on negative advantages only: a positive one has a negative cost.
            cost, is_clipped = torch.minimum(cost, ceiling), is_clipped | (cost > ceiling)
        return cost, is_clipped

    def _reduce(
        self,
        cost: torch.Tensor,
        mask: torch.Tensor,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> torch.Tensor:
        if self.loss_type is LossType.TOKEN_LEVEL:
            return _share_of(cost, mask, global_valid_toks)
        # A sequence without targets has weight 0, not 0 / 0.
        weights = mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return _share_of(cost, weights, global_valid_seqs)

    def _require_keys(self, data: Mapping[str, torch.Tensor]) -> None:
        reasons = {
            "token_mask": "the target tokens",
            "sample_mask": "the valid samples",
            "advantages": "the advantage of each token",
            "prev_logprobs": "the log-probabilities before the update",
        }
        if self.kl_coef > 0:
            reasons["reference_logprobs"] = f"read as kl_coef={self.kl_coef}"
        if self.importance_cap is not None:
            reasons["generation_logprobs"] = f"read as importance_cap={self.importance_cap}"
        _require_keys(data, reasons, loss=type(self).__name__)


def group_relative_advantages(
    rewards: torch.Tensor,
    *,
    group_size: int,
    leave_one_out: bool = False,
    divide_by_std: bool = True,
) -> torch.Tensor:
    """Return the advantage of each completion; a group of equal rewards gets zeros.

    GRPO (Shao et al. 2024) computes `(r - mean) / std` over the completions of one prompt. Without
    the division it is the estimator of Dr. GRPO (Liu et al. 2025); with the mean over the *other*
    completions as the baseline it is RLOO (Ahmadian et al. 2024).

    Example, `rewards = [1, 0, 0, 0]` and `group_size = 4`, standard deviation (n - 1) 0.5:
        default                                  [ 1.5, -0.5, -0.5, -0.5]
        divide_by_std=False                      [0.75, -0.25, -0.25, -0.25]
        leave_one_out=True, divide_by_std=False  [ 1.0, -1/3, -1/3, -1/3]

    Args:
        rewards: `[batch]`, any float; the completions of a prompt are adjacent.
        group_size: Completions per prompt, at least 2.
        leave_one_out: Exclude a completion's own reward from its baseline.
        divide_by_std: Divide by the standard deviation of the group.

    Returns:
        `[batch]` float32.

    Raises:
        ValueError: `group_size` is below 2, or does not divide the batch.
    """
    if group_size < 2:
        raise ValueError(f"group_size={group_size} must be at least 2: there is nothing to compare")
    if rewards.shape[0] % group_size:
        raise ValueError(f"group_size={group_size} does not divide {rewards.shape[0]} rewards")
    groups = rewards.float().view(-1, group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    # The mean of equal rewards is rounded: without this, `std` would amplify the rounding error.
    is_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    advantages = advantages.masked_fill(is_equal, 0.0)
    if leave_one_out:
        # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
        advantages = advantages * (group_size / (group_size - 1))
    if divide_by_std:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + STD_EPSILON)
    return advantages.view(-1)


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
        _require_keys(data, reasons, loss=type(self).__name__)
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
        _require_keys(data, {"sample_mask": "the valid samples"}, loss=name)
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
        name: _share_of(values.detach(), is_valid, num_pairs) for name, values in measured.items()
    }
    return _share_of(cost, is_valid, num_pairs), _with_samples(shares, data)


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
    """Return `[batch]`, the sum of log(policy / reference) over each row's target tokens."""
    reference = _target_column(data, "reference_logprobs", logprobs)
    return _masked_difference(logprobs, reference, _target_mask(data)).sum(dim=1)


def _require_keys(
    data: Mapping[str, torch.Tensor], reasons: Mapping[str, str], *, loss: str
) -> None:
    """Raise `ValueError` with the reason, the value of `reasons`, if a key is not in the batch."""
    for key, reason in reasons.items():
        if key not in data:
            raise ValueError(f"{loss} needs the key {key!r} in the batch: {reason}")


def _target_mask(data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return `[batch, seq - 1]` float32, 1 at the target tokens of valid samples."""
    return data["token_mask"][:, 1:].float() * data["sample_mask"].float()[:, None]


def _target_column(
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


def _masked_difference(left: torch.Tensor, right: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `left - right` at the targets and 0 elsewhere, where its `exp` could overflow."""
    # Not `* mask`: infinity times 0 is NaN.
    return torch.where(mask > 0, left - right, 0.0)


def _share_of(values: torch.Tensor, weights: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over a global count; a global batch without targets gives 0."""
    return (values * weights).sum() / torch.as_tensor(count, device=values.device).clamp(min=1)


def _with_samples(
    metrics: Mapping[str, torch.Tensor], data: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the metrics and `num_valid_samples` of the micro-batch, 0-d tensors.

    They stay on the device: the worker reads those of all micro-batches at the end of the call.
    """
    return {**metrics, "num_valid_samples": data["sample_mask"].sum().long()}
