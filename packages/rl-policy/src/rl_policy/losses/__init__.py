"""Losses over token log-probabilities, and the advantages that the policy gradient weighs them by.

All implement `rl_interfaces.LossFunction`, which describes the arguments of a call, on token
log-probabilities `[batch, seq]` float32; but `DistillationLoss` is on logits `[batch, seq, vocab]`,
`PreferenceLoss` on scores `[batch]`, and `ValueLoss` on values `[batch, seq]`. The loss of
a micro-batch is a sum divided by a count over the *global* batch, so that the values of all
micro-batches and data-parallel ranks add up to the loss of the batch. Metrics are normalised the
same way: summed, they are means over the global batch.

Column 0 of every `[batch, seq]` tensor is dropped, as no position predicts the first token.
"""

from rl_policy.losses.advantages import (
    STD_EPSILON,
    explained_variance,
    generalized_advantages,
    group_relative_advantages,
    groups_with_signal,
    overlong_penalties,
    per_reward_advantages,
    reward_to_go_penalty,
    token_rewards,
    token_values,
    whiten,
)
from rl_policy.losses.distillation import DistillationLoss
from rl_policy.losses.policy_gradient import (
    ClippedPGLoss,
    Clipping,
    ImportanceMode,
    KLEstimator,
    RatioLevel,
    estimate_kl,
)
from rl_policy.losses.preference import ROWS_PER_PAIR, DPOLoss, PreferenceLoss
from rl_policy.losses.reduction import NLLLoss
from rl_policy.losses.value import ValueLoss

__all__ = [
    "ROWS_PER_PAIR",
    "STD_EPSILON",
    "ClippedPGLoss",
    "Clipping",
    "DPOLoss",
    "DistillationLoss",
    "ImportanceMode",
    "KLEstimator",
    "NLLLoss",
    "PreferenceLoss",
    "RatioLevel",
    "ValueLoss",
    "estimate_kl",
    "explained_variance",
    "generalized_advantages",
    "group_relative_advantages",
    "groups_with_signal",
    "overlong_penalties",
    "per_reward_advantages",
    "reward_to_go_penalty",
    "token_rewards",
    "token_values",
    "whiten",
]
