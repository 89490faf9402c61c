"""The divergence of a student's next-token distributions from a teacher's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from rl_interfaces import LossInput, LossType

from rl_policy.losses.reduction import require_keys, share_of, target_mask, with_samples

# The logit of a token that is never sampled: finite, as 0 times an infinite one is no number.
_NEVER = -1e30


@dataclass(kw_only=True, slots=True)
class DistillationLoss:
    """The generalized Jensen-Shannon divergence from a teacher (Agarwal et al. 2024, equation 1).

    With the teacher's distribution `t` of a token, the student's `s` and their mixture
    `m = beta * t + (1 - beta) * s`, a target token costs

        beta * KL(t || m) + (1 - beta) * KL(s || m)        0 < beta < 1
        KL(t || s)                                         beta = 0, forward
        KL(s || t)                                         beta = 1, reverse

    and the loss is the mean over the target tokens. Of the teacher the `k` largest logits are
    known: `t` is their softmax, and 0 for all other tokens. The student's whole distribution is
    compared with that, so that what it gives to other tokens costs too; with
    `truncates_student` it is renormalised over the same `k` tokens, and what it gives to others is
    free. With `k` of the vocabulary's size both are the exact divergence.

    The teacher's output matrix may have more rows than the student's, as sizes of one family pad
    the same vocabulary differently: of its `k` tokens those that the student lacks have the
    probability 0 too.

    The batch holds `token_mask` `[batch, seq]`, `sample_mask` `[batch]`, and `topk_logits` float32
    and `topk_indices` int64 `[batch, seq, k]`, see `rl_interfaces.TopkLogitsOutputSpec`.

    Example, one target token, a vocabulary of 2, teacher (0.75, 0.25), student (0.5, 0.5):
        beta = 0: 0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5) = 0.1308 nats
        beta = 1: 0.5 * log(0.5 / 0.75) + 0.5 * log(0.5 / 0.25)   = 0.1438

    Attributes:
        beta: In [0, 1].
        truncates_student: Compare with the student's distribution over the teacher's `k` tokens.
            `beta = 1` needs it, unless `k` is the size of the vocabulary: the reverse divergence is
            infinite where the teacher's probability is 0.
    """

    beta: float = 0.5
    truncates_student: bool = False
    loss_type: LossType = field(default=LossType.TOKEN_LEVEL, init=False)
    input_type: ClassVar[LossInput] = LossInput.LOGITS
    uses_sampling_temperature: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raise `ValueError`, naming the argument, if a value is out of its range."""
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta={self.beta} must lie in [0, 1]")

    def __call__(
        self,
        next_token_logits: torch.Tensor,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the micro-batch's share of the loss, and its metrics.

        Returns:
            The 0-d loss in nats per target token, and 0-d tensors that add up over micro-batches to
            means over target tokens: `teacher_coverage`, the student's probability of the teacher's
            `k` tokens, and `teacher_agreement`, whether both have the same most likely token; and
            the count `num_valid_samples`.

        Raises:
            ValueError: The batch lacks a column, or `beta = 1` is infinite.
        """
        reasons = {
            "token_mask": "the target tokens",
            "sample_mask": "the valid samples",
            "topk_logits": "the teacher's largest logits",
            "topk_indices": "the tokens of the teacher's largest logits",
        }
        require_keys(data, reasons, loss=type(self).__name__)
        # Position `t` scores token `t + 1`.
        teacher_logits, indices = (data[key][:, :-1] for key in ("topk_logits", "topk_indices"))
        self._check(next_token_logits[:, :-1], teacher_logits)
        mask = target_mask(data)
        # Targets alone: logits of other positions may be anything, and have no gradient.
        is_target = mask > 0
        weights = mask[is_target]
        teacher_logits, indices = teacher_logits[is_target], indices[is_target]
        logits = next_token_logits[:, :-1][is_target].float()
        normalizer = logits.logsumexp(-1)
        is_missing = indices >= logits.shape[-1]
        teacher = teacher_logits.float().masked_fill(is_missing, _NEVER).log_softmax(-1)
        chosen = logits.gather(-1, indices.where(~is_missing, 0)).masked_fill(is_missing, _NEVER)
        coverage = (chosen.logsumexp(-1) - normalizer).exp()
        if self.truncates_student:
            student = chosen.log_softmax(-1)
            outside = torch.zeros_like(coverage)
        else:
            student = chosen - normalizer[..., None]
            outside = (1 - coverage).clamp(min=0)
        cost = self._divergence(teacher, student, outside)
        agreement = (logits.argmax(-1) == indices[..., 0]).float()
        measured = {"teacher_coverage": coverage.detach(), "teacher_agreement": agreement}
        shares = {
            name: share_of(values, weights, global_valid_toks) for name, values in measured.items()
        }
        return share_of(cost, weights, global_valid_toks), with_samples(shares, data)

    def _check(self, logits: torch.Tensor, teacher_logits: torch.Tensor) -> None:
        if teacher_logits.ndim != 3 or teacher_logits.shape[:2] != logits.shape[:2]:
            raise ValueError(
                f"topk_logits without its last position has shape {tuple(teacher_logits.shape)}, "
                f"and the logits {tuple(logits.shape)}: it has k logits for each position"
            )
        k, vocab_size = teacher_logits.shape[2], logits.shape[2]
        if self.beta == 1 and not self.truncates_student and k < vocab_size:
            raise ValueError(
                f"beta=1 is infinite with k={k} of {vocab_size} tokens, as the teacher's "
                "probability of the others is 0: set truncates_student=True, or beta below 1"
            )

    def _divergence(
        self, teacher: torch.Tensor, student: torch.Tensor, outside: torch.Tensor
    ) -> torch.Tensor:
        """Return `[targets]` from log-probabilities `[targets, k]`.

        Args:
            teacher: Sums to 1.
            student: Sums to `1 - outside`.
            outside: `[targets]`, the student's probability of all other tokens.
        """
        if self.beta == 0:
            return _kl(teacher, student)
        if self.beta == 1:
            return _kl(student, teacher)
        own, other = math.log(self.beta), math.log1p(-self.beta)
        mixture = torch.logaddexp(teacher + own, student + other)
        # There the mixture is the student alone, times 1 - beta.
        beyond = -other * outside
        return self.beta * _kl(teacher, mixture) + (1 - self.beta) * (
            _kl(student, mixture) + beyond
        )


def _kl(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the sum of `p * log(p / q)` over the last dim, of log-probabilities."""
    return (left.exp() * (left - right)).sum(-1)
