"""Policy-gradient losses: PPO's clipped surrogate with the terms of GRPO and its successors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from rl_interfaces import LossInput, LossType

from rl_policy.losses.reduction import (
    as_numbers,
    masked_difference,
    require_keys,
    share_of,
    target_column,
    target_mask,
)


@dataclass(kw_only=True, slots=True)
class ClippedPGLoss:
    """The clipped policy-gradient loss of PPO, with the terms that GRPO and its successors add.

    With the ratio `r = exp(logprob - prev_logprob)` and the advantage `A`, a token costs

        -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k3

    - clipped surrogate: PPO (Schulman et al. 2017); unequal bounds are "clip-higher" of DAPO (Yu et
      al. 2025);
    - `dual_clip`: where `A < 0` the first term is at most `dual_clip * |A|` (Ye et al. 2020);
    - `k3 = exp(d) - d - 1` with `d = reference_logprob - logprob`: the estimator of
      KL(policy || reference) that is never negative (Schulman 2020), as a term of the loss: GRPO
      (Shao et al. 2024);
    - `w = min(exp(prev_logprob - generation_logprob), importance_cap)`: truncated importance
      sampling (Ionides 2008), for a sampler whose numbers differ from the trainer's.

    The batch holds `token_mask`, `advantages` and `prev_logprobs` `[batch, seq]`, `sample_mask`
    `[batch]`, `reference_logprobs` `[batch, seq]` where `kl_coef > 0`, and `generation_logprobs`
    `[batch, seq]` where `importance_cap` is set. Either of the last two is measured when present.

    Example, one row with one target token, `clip_low = clip_high = 0.2`:
        logprob = log 0.6, prev_logprob = log 0.4: r = 1.5
        A = +1: -min(1.5, 1.2)   = -1.2, clipped: no gradient
        A = -1: -min(-1.5, -1.2) =  1.5, not clipped; with dual_clip = 1.4 it is 1.4, no gradient

    Attributes:
        clip_low: How far the ratio may fall below 1, in [0, 1).
        clip_high: How far the ratio may rise above 1, not negative.
        dual_clip: Largest cost per unit of negative advantage, above 1. None: no bound.
        kl_coef: Weight of the KL penalty, not negative.
        importance_cap: Largest importance weight, at least 1. None: no correction.
        loss_type: `TOKEN_LEVEL`: every token counts the same (DAPO). `SEQUENCE_LEVEL`: every
            sequence counts the same, as the mean over its tokens (GRPO). Or its value, as in YAML.
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
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the micro-batch's share of the loss, and its metrics.

        Args:
            next_token_logits: `[batch, seq]` float32 token log-probabilities.
            data: The micro-batch, see the class.
            global_valid_seqs: 0-d; valid sequences of the global batch.
            global_valid_toks: 0-d; valid target tokens of the global batch.

        Returns:
            The 0-d loss, and floats that add up over micro-batches: `policy_loss`, `kl` (k3 per
            token, where there is a reference), `entropy` (per token, estimated as minus the
            log-probability of the sampled tokens), `clip_fraction` (share of tokens whose gradient
            a bound sets to zero), `probs_ratio` (mean of r), `sampler_trainer_ratio` (mean of
            `exp(prev_logprob - generation_logprob)`, if the batch has the latter; 1 if sampler and
            trainer agree), and `num_valid_samples`.
        """
        self._require_keys(data)
        mask = target_mask(data)
        counts = (global_valid_seqs, global_valid_toks)
        policy_cost, kl, metrics = self._token_terms(next_token_logits[:, 1:], data, mask)
        cost = policy_cost if kl is None else policy_cost + self.kl_coef * kl
        shares = {
            name: share_of(values.detach(), mask, global_valid_toks)
            for name, values in metrics.items()
        }
        shares["policy_loss"] = self._reduce(policy_cost.detach(), mask, *counts)
        return self._reduce(cost, mask, *counts), as_numbers(shares, data)

    def _token_terms(
        self, logprobs: torch.Tensor, data: Mapping[str, torch.Tensor], mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
        """Return policy cost, KL (None without a reference) and measures, `[batch, seq - 1]`."""
        prev = target_column(data, "prev_logprobs", logprobs)
        ratio = masked_difference(logprobs, prev, mask).exp()
        cost, is_clipped = self._clipped_cost(ratio, target_column(data, "advantages", logprobs))
        metrics = {"clip_fraction": is_clipped.float(), "probs_ratio": ratio, "entropy": -logprobs}
        if "generation_logprobs" in data:
            sampler = target_column(data, "generation_logprobs", logprobs)
            weight = masked_difference(prev, sampler, mask).exp()
            metrics["sampler_trainer_ratio"] = weight
            if self.importance_cap is not None:
                cost = cost * weight.clamp(max=self.importance_cap)
        if "reference_logprobs" not in data:
            return cost, None, metrics
        log_ratio = masked_difference(
            target_column(data, "reference_logprobs", logprobs), logprobs, mask
        )
        metrics["kl"] = torch.expm1(log_ratio) - log_ratio
        return cost, metrics["kl"], metrics

    def _clipped_cost(
        self, ratio: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cost of each token, and where a bound sets its gradient to zero."""
        free = -ratio * advantages
        bounded = -ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        cost, is_clipped = torch.maximum(free, bounded), bounded > free
        if self.dual_clip is not None:
            ceiling = self.dual_clip * advantages.abs()
            # Where the advantage is positive the cost is negative, and never above the ceiling.
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
            return share_of(cost, mask, global_valid_toks)
        weights = mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return share_of(cost, weights, global_valid_seqs)

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
        require_keys(data, reasons, loss=type(self).__name__)
