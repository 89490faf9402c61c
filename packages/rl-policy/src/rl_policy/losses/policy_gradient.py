"""The policy-gradient loss: ratio, clipping, correction of the sampler, KL penalty, entropy bonus.

One class with settings that combine, instead of a class for each algorithm;
`rl_policy.recipes.policy_gradient.objectives` has the named combinations. Advantages are in
`rl_policy.losses.advantages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from rl_interfaces import LossInput, LossType

from rl_policy.losses.reduction import (
    masked_difference,
    require_keys,
    share_of,
    target_column,
    target_mask,
    weighted_mean,
    with_samples,
)

RatioLevel: TypeAlias = Literal["token", "sequence"]
"""What the ratio of new and old policy is of: a token, or a sequence."""
Clipping: TypeAlias = Literal["ppo", "cispo"]
"""How the ratio is clipped."""
KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
"""An estimator of KL(policy || reference) from one sampled token, see `estimate_kl`."""
ImportanceMode: TypeAlias = Literal[
    "token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "geometric_mask"
]
"""How importance weights between sampler and trainer are bounded."""


@dataclass(kw_only=True, slots=True)
class ClippedPGLoss:
    """The clipped policy-gradient loss of PPO, with the terms of GRPO and its successors.

    With the ratio `r = exp(logprob - prev_logprob)` and the advantage `A`, a token costs

        -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * kl - entropy_coef * h

    Ratio and clipping
    - clipped surrogate: PPO (Schulman et al. 2017); unequal bounds are "clip-higher" of DAPO (Yu et
      al. 2025);
    - `dual_clip`: where `A < 0` the first term is at most `dual_clip * |A|` (Ye et al. 2020);
    - `ratio_level="sequence"`: `r = exp(mean of logprob - prev_logprob over the targets of the
      row)`, the same for all of its tokens: GSPO (Zheng et al. 2025);
    - `clipping="cispo"`: the first term is `-w * stop_gradient(clip(r, ...)) * A * logprob`, so
      that a clipped token keeps its gradient: CISPO (MiniMax 2025). With both bounds 0 it is
      REINFORCE.

    Correction of the difference between sampler and trainer, if `importance_cap` is set: with the
    weight `v = exp(prev_logprob - generation_logprob)` of a token, and the product `V` and the
    geometric mean `G` of the row's `v`, `w` is by `importance_mode`
    - `token_truncate`: `clip(v, floor, cap)`: truncated importance sampling (Ionides 2008);
    - `sequence_truncate`: `clip(V, floor, cap)`;
    - `token_mask`: `v`, and 0 if `v` is beyond a bound: IcePop (Ling team 2025);
    - `sequence_mask`: `V`, and 0 if `V` is beyond a bound: masked importance sampling (Liu, Li et
      al. 2025);
    - `geometric_mask`: `v`, and 0 for the tokens of a row whose `G` is beyond a bound (the same).
    What is masked counts in the mean: the counts are those of the global batch.

    Penalty and bonus, neither weighted by `w`
    - `kl` estimates KL(policy || reference) by `kl_estimator`, see `estimate_kl`: GRPO (Shao et
      al. 2024) has `k3`. `kl_unbiased` multiplies it by the ratio of the token, so that its
      gradient is that of the KL (DeepSeek-V3.2, 2025; Tang and Munos 2025);
    - `h = -r * logprob` with the ratio of the token: the entropy, estimated from the sampled token,
      whose expected gradient is that of the exact entropy.

    The batch holds `token_mask`, `advantages` and `prev_logprobs` `[batch, seq]`, `sample_mask`
    `[batch]`, `reference_logprobs` `[batch, seq]` if `kl_coef > 0`, and `generation_logprobs`
    `[batch, seq]` if `importance_cap` is set. If present, the last two are reported as metrics even
    when the loss does not need them.

    Everything of a sequence, such as its ratio, needs the full row. A worker calls a loss of
    `LOGPROBS` with full rows `[batch, seq]` in every layout: packed rows are unpacked, and those
    that context parallelism shards are gathered, before the call.

    Example, one row with one target token, `clip_low = clip_high = 0.2`:
        logprob = log 0.6, prev_logprob = log 0.4: r = 1.5
        A = +1: -min(1.5, 1.2)   = -1.2, clipped: no gradient
        A = -1: -min(-1.5, -1.2) =  1.5, not clipped; with dual_clip = 1.4 it is 1.4, no gradient
        A = +1, cispo: -1.2 * log 0.6 = 0.613, and its gradient by logprob is -1.2

    Attributes:
        clip_low: The ratio is clipped to at least `1 - clip_low`; in [0, 1). None: no bound.
        clip_high: The ratio is clipped to at most `1 + clip_high`; not negative. None: no bound.
        dual_clip: Upper bound of the cost per unit of negative advantage, above 1. None: no bound.
        kl_coef: Coefficient of the KL penalty, not negative.
        importance_cap: Upper bound of the importance weight, at least 1. None: no correction.
        loss_type: `TOKEN_LEVEL`: the mean over all tokens (DAPO). `SEQUENCE_LEVEL`: the mean over
            sequences of their token means (GRPO). Or the enum's value, as in YAML.
        length_divisor: With `SEQUENCE_LEVEL`: the number of tokens by which the sum over each
            sequence is divided, instead of its own: the most that a completion has in Dr. GRPO
            (Liu et al. 2025), 1 for sums. None: its own.
        ratio_level: `token` or `sequence`.
        clipping: `ppo` or `cispo`.
        importance_floor: Lower bound of the importance weight, in [0, 1]. None: no bound.
        importance_mode: What the bounds are of, and what happens beyond them.
        kl_estimator: `k1`, `k2` or `k3`.
        kl_log_ratio_clamp: The log-ratio in the KL estimate is clamped to at most this, in nats.
            None: it is not.
        kl_clamp: The KL estimate of a token is clamped to at most this, in nats. None: it is not.
        kl_unbiased: Multiply the KL estimate by the ratio.
        entropy_coef: Coefficient of the entropy bonus, not negative.
    """

    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    importance_cap: float | None = None
    loss_type: LossType = LossType.TOKEN_LEVEL
    length_divisor: float | None = None
    ratio_level: RatioLevel = "token"
    clipping: Clipping = "ppo"
    importance_floor: float | None = None
    importance_mode: ImportanceMode = "token_truncate"
    kl_estimator: KLEstimator = "k3"
    kl_log_ratio_clamp: float | None = None
    kl_clamp: float | None = None
    kl_unbiased: bool = False
    entropy_coef: float = 0.0
    input_type: ClassVar[LossInput] = LossInput.LOGPROBS

    def __post_init__(self) -> None:
        """Raise `ValueError`, naming the argument, if a value is out of its range."""
        self.loss_type = LossType(self.loss_type)
        for problem in (*self._outside_ranges(), *self._contradictions()):
            raise ValueError(problem)

    def _outside_ranges(self) -> Iterator[str]:
        for name, (is_right, meaning) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not is_right(value):
                yield f"{name}={value} {meaning}"
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in kind.__args__:
                yield f"{name}={getattr(self, name)!r} must be one of {', '.join(kind.__args__)}"

    def _contradictions(self) -> Iterator[str]:
        is_token_level = self.loss_type is LossType.TOKEN_LEVEL
        if self.ratio_level == "sequence" and is_token_level:
            yield (
                "ratio_level='sequence' contradicts loss_type='token_level', which would count the "
                "ratio of a sequence once for each of its tokens: set loss_type='sequence_level'"
            )
        if self.length_divisor is not None and is_token_level:
            yield (
                f"length_divisor={self.length_divisor} contradicts loss_type='token_level', whose "
                "mean is over all tokens: set loss_type='sequence_level'"
            )
        if self.clipping == "cispo" and self.dual_clip is not None:
            yield (
                f"dual_clip={self.dual_clip} contradicts clipping='cispo', whose weight clip_high "
                "bounds for either sign of the advantage: set dual_clip=null"
            )
        if self.importance_floor is not None and self.importance_cap is None:
            yield (
                f"importance_floor={self.importance_floor} needs importance_cap, without which "
                "nothing is corrected: set importance_cap"
            )
        if (
            self.importance_cap is not None
            and self.importance_mode == "token_mask"
            and self.ratio_level == "sequence"
        ):
            yield (
                "importance_mode='token_mask' contradicts ratio_level='sequence': the ratio of its "
                "sequence would still train a masked token: set importance_mode='sequence_mask'"
            )
        if self.kl_coef and self.kl_estimator == "k1" and not self.kl_unbiased:
            yield (
                f"kl_estimator='k1' contradicts kl_coef={self.kl_coef} in the loss: the expected "
                "gradient of logprob - reference_logprob is zero; set kl_unbiased=true, or "
                "kl_estimator='k2'"
            )

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the micro-batch's share of the loss, and its metrics.

        Returns:
            The 0-d loss, and 0-d tensors that add up over micro-batches: `policy_loss`, `kl` (per
            token by `kl_estimator`, with a reference), `entropy` (per token, estimated as the
            negative log-probability of the sampled tokens), `clip_fraction` (fraction of tokens
            whose gradient is zero because of clipping, or whose weight is clipped in CISPO),
            `probs_ratio` (mean of r), `sampler_trainer_ratio` (mean of
            `exp(prev_logprob - generation_logprob)`, if the batch has the latter; 1 if sampler and
            trainer agree), `importance_outside` (fraction of tokens whose weight, or that of their
            sequence, is beyond a bound, with `importance_cap`), and `num_valid_samples`.

        Raises:
            ValueError: The batch lacks a column, or its shape is wrong.
        """
        self._require_columns(data)
        mask = target_mask(data)
        counts = (global_valid_seqs, global_valid_toks)
        policy_cost, regularizer, metrics = self._token_terms(next_token_logits[:, 1:], data, mask)
        cost = policy_cost if regularizer is None else policy_cost + regularizer
        shares = {
            name: share_of(values.detach(), mask, global_valid_toks)
            for name, values in metrics.items()
        }
        weights = self._weights(mask, data)
        count = counts[self.loss_type is LossType.TOKEN_LEVEL]
        shares["policy_loss"] = share_of(policy_cost.detach(), weights, count)
        return share_of(cost, weights, count), with_samples(shares, data)

    def _token_terms(
        self, logprobs: torch.Tensor, data: Mapping[str, torch.Tensor], mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
        """Return policy cost, KL penalty and entropy bonus, and measures, `[batch, seq - 1]`."""
        prev = target_column(data, "prev_logprobs", logprobs)
        log_ratio = masked_difference(logprobs, prev, mask)
        # Within a row the weights of its tokens count, and not the row's own.
        tokens = data["token_mask"][:, 1:].float() * (mask > 0)
        # A prompt may hold tokens of probability 0, and infinity times 0 is NaN.
        target_logprobs = torch.where(mask > 0, logprobs, 0.0)
        own_log_ratio = log_ratio
        if self.ratio_level == "sequence":
            own_log_ratio = weighted_mean(log_ratio, tokens).expand_as(log_ratio)
        advantages = target_column(data, "advantages", logprobs).to(logprobs.dtype)
        advantages = torch.where(mask > 0, advantages, 0.0)
        ratio = own_log_ratio.detach().exp()
        metrics = {"probs_ratio": ratio, "entropy": -logprobs}
        weight = torch.ones_like(ratio)
        if "generation_logprobs" in data:
            sampler = target_column(data, "generation_logprobs", logprobs)
            log_weight = masked_difference(prev, sampler, mask)
            metrics["sampler_trainer_ratio"] = log_weight.exp()
            if self.importance_cap is not None:
                weight, is_outside = self._importance(log_weight, tokens, self.importance_cap)
                weight = weight.expand_as(ratio)
                metrics["importance_outside"] = is_outside.float().expand_as(ratio)
        # Where the cost is a constant, no ratio may overflow: infinity times 0 is NaN.
        is_learned = (advantages != 0) & (weight != 0)
        if self.clipping == "cispo":
            clipped = self._clip(ratio)
            is_clipped = clipped != ratio
            factor = torch.where(is_learned, clipped * weight * advantages, 0.0)
            cost = -factor * torch.where(is_learned, target_logprobs, 0.0)
        else:
            bound = self._bound(ratio, advantages)
            is_clipped = (advantages != 0) & ~bound.isnan()
            is_free = is_learned & ~is_clipped
            free = -torch.where(is_free, own_log_ratio, 0.0).exp() * advantages
            cost = torch.where(is_free, free, torch.where(is_clipped, bound, 0.0))
            cost = torch.where(is_learned, cost * weight, 0.0)
        metrics["clip_fraction"] = is_clipped.float()
        regularizer = None
        if "reference_logprobs" in data:
            reference = target_column(data, "reference_logprobs", logprobs)
            metrics["kl"] = kl = self._estimate_kl(masked_difference(reference, logprobs, mask))
            if self.kl_coef:
                regularizer = self.kl_coef * (kl * log_ratio.exp() if self.kl_unbiased else kl)
        if self.entropy_coef:
            bonus = self.entropy_coef * log_ratio.exp() * target_logprobs
            regularizer = bonus if regularizer is None else regularizer + bonus
        return cost, regularizer, metrics

    def _bound(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Return the constant cost of each token that a bound acts on; NaN for the others."""
        # Strictly greater: where both costs are equal nothing is clipped.
        free = -ratio * advantages
        bounded = -self._clip(ratio) * advantages
        bound = torch.where(bounded > free, bounded, torch.nan)
        if self.dual_clip is not None:
            ceiling = self.dual_clip * advantages.abs()
            # The ceiling acts on negative advantages only: a positive one has a negative cost.
            bound = torch.where(torch.fmax(free, bound) > ceiling, ceiling, bound)
        return bound

    def _clip(self, ratio: torch.Tensor) -> torch.Tensor:
        low = None if self.clip_low is None else 1 - self.clip_low
        high = None if self.clip_high is None else 1 + self.clip_high
        return ratio if low is None and high is None else ratio.clamp(low, high)

    def _importance(
        self, log_weight: torch.Tensor, mask: torch.Tensor, cap: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight of each token or row, and whether it is beyond a bound.

        Args:
            log_weight: `[batch, seq - 1]`, log(trainer / sampler); 0 where there is no target.
            mask: The targets.
            cap: The upper bound.
        """
        level, _, action = self.importance_mode.partition("_")
        weight = log_weight.exp()
        if level == "sequence":
            weight = (log_weight * mask).sum(dim=1, keepdim=True).exp()
        bounded = weighted_mean(log_weight, mask).exp() if level == "geometric" else weight
        is_outside = ~(bounded <= cap)  # NaN is outside too
        if self.importance_floor is not None:
            is_outside = is_outside | (bounded < self.importance_floor)
        if action == "truncate":
            return weight.clamp(min=self.importance_floor, max=cap), is_outside
        return weight.masked_fill(is_outside, 0.0), is_outside

    def _estimate_kl(self, log_ratio: torch.Tensor) -> torch.Tensor:
        return estimate_kl(
            log_ratio,
            estimator=self.kl_estimator,
            log_ratio_clamp=self.kl_log_ratio_clamp,
            clamp=self.kl_clamp,
        )

    def _weights(self, mask: torch.Tensor, data: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight of each token in the sum over the batch, `[batch, seq - 1]`."""
        if self.loss_type is LossType.TOKEN_LEVEL:
            return mask
        if self.length_divisor is not None:
            return mask / self.length_divisor
        # By the tokens alone: a row of weight 0.5 is half a row, however many tokens it has.
        total = data["token_mask"][:, 1:].float().sum(dim=1, keepdim=True)
        return mask / torch.where(total > 0, total, 1.0)

    def _require_columns(self, data: Mapping[str, torch.Tensor]) -> None:
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
        require_keys(data, reasons, loss=type(self).__name__)


_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "clip_low": (lambda value: 0 <= value < 1, "must lie in [0, 1)"),
    "clip_high": (lambda value: value >= 0, "must not be negative"),
    "dual_clip": (lambda value: value > 1, "must be greater than 1"),
    "kl_coef": (lambda value: value >= 0, "must not be negative"),
    "importance_cap": (lambda value: value >= 1, "must be at least 1"),
    "importance_floor": (lambda value: 0 <= value <= 1, "must lie in [0, 1]"),
    "length_divisor": (lambda value: value > 0, "must be positive"),
    "kl_log_ratio_clamp": (lambda value: value > 0, "must be positive"),
    "kl_clamp": (lambda value: value > 0, "must be positive"),
    "entropy_coef": (lambda value: value >= 0, "must not be negative"),
}
_CHOICES = {
    "ratio_level": RatioLevel,
    "clipping": Clipping,
    "importance_mode": ImportanceMode,
    "kl_estimator": KLEstimator,
}


def estimate_kl(
    log_ratio: torch.Tensor,
    *,
    estimator: KLEstimator = "k3",
    log_ratio_clamp: float | None = None,
    clamp: float | None = None,
) -> torch.Tensor:
    """Return an estimate of KL(policy || reference) from each sampled token (Schulman 2020).

    With `d = reference_logprob - logprob`: `k1 = -d` is unbiased and may be negative,
    `k2 = d ** 2 / 2` has the gradient of the KL, and `k3 = exp(d) - d - 1` is unbiased and not
    negative.

    Example, logprob = log 0.5, reference_logprob = log 0.25, so d = -log 2:
        k1 = 0.6931, k2 = 0.2402, k3 = 0.5 + 0.6931 - 1 = 0.1931

    Args:
        log_ratio: `d`, of any shape, in nats.
        estimator: `k1`, `k2` or `k3`.
        log_ratio_clamp: `d` is clamped to `[-log_ratio_clamp, log_ratio_clamp]`. None: it is not.
        clamp: The estimate is clamped to `[-clamp, clamp]`. None: it is not.

    Returns:
        Estimates of the shape of `log_ratio`, in nats.
    """
    if log_ratio_clamp is not None:
        log_ratio = log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp)
    if estimator == "k1":
        estimate = -log_ratio
    elif estimator == "k2":
        estimate = log_ratio**2 / 2
    else:
        estimate = torch.expm1(log_ratio) - log_ratio
    return estimate if clamp is None else estimate.clamp(-clamp, clamp)
