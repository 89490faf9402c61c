"""The advantages of a step of GRPO: baselines, whitening, and penalties in the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_policy.config import RewardSection, RunConfig
from rl_policy.data.rewards import Rewards
from rl_policy.losses import (
    estimate_kl,
    group_relative_advantages,
    overlong_penalties,
    per_reward_advantages,
    reward_to_go_penalty,
    whiten,
)
from rl_policy.recipes.grpo_config import GrpoSection, LossSection
from rl_policy.recipes.policy_gradient.config import PolicyLossSection


def step_advantages(
    batch: Mapping[str, torch.Tensor],
    rewards: Sequence[float],
    *,
    config: RunConfig,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the advantage of each token of a step's completions, and what was put into them.

    Args:
        batch: `token_mask` `[batch, seq]` and `sample_mask` `[batch]`; for a KL penalty in the
            reward also `prev_logprobs` and `reference_logprobs` `[batch, seq]`.
        rewards: Of each completion; `Rewards` with their parts, where there are several.
        config: Of the run.

    Returns:
        `[batch, seq]` float32, the same for all tokens of a completion unless `loss.kl_in` is
        `reward_to_go`; and the mean `overlong_penalty` and `reward_kl`, in nats per completion,
        where there are such.
    """
    grpo, loss = config.section(GrpoSection), config.section(LossSection)
    reward = config.section(RewardSection)
    if grpo.normalize_each_reward:
        values = reward_columns(rewards)
    else:
        values = torch.tensor(rewards, dtype=torch.float64)
    mask = batch["token_mask"] * (batch["sample_mask"] > 0)[:, None].long()
    weights = [*(reward.weights or [1.0] * len(reward.functions))]
    measured: dict[str, float] = {}
    if grpo.overlong_share:
        max_length = int(config.policy["generation"]["max_new_tokens"])
        penalties = grpo.overlong_penalty * overlong_penalties(
            mask.sum(1), max_length=max_length, buffer=grpo.overlong_share * max_length
        )
        measured["overlong_penalty"] = float(penalties.mean())
        # Beside rewards that are normalised on their own it is one more of them.
        if values.ndim == 2:
            values = torch.cat([values, penalties[:, None]], dim=1)
        else:
            values = values + penalties
        weights.append(1.0)
    kl = None
    if loss.kl_coef and loss.kl_in != "loss":
        kl = loss.kl_coef * kl_estimates(batch, mask, loss)
        measured["reward_kl"] = float(kl.sum(1).mean()) / loss.kl_coef
    if kl is not None and loss.kl_in == "reward":
        values = values - kl.sum(1)
    advantages = _baselined(values, grpo=grpo, weights=weights)
    if grpo.whiten == "samples":
        advantages = whiten(advantages, batch["sample_mask"], correction=1)
    tokens = advantages[:, None].expand(mask.shape)
    if kl is not None and loss.kl_in == "reward_to_go":
        tokens = tokens - reward_to_go_penalty(kl, mask)
    if grpo.whiten == "tokens":
        tokens = whiten(tokens, mask)
    return tokens.float().contiguous(), measured


def reward_columns(rewards: Sequence[float]) -> torch.Tensor:
    """Return the parts of rewards, `[batch, parts]` float64, or `[batch, 1]` if they have none."""
    parts = [*rewards.parts.values()] if isinstance(rewards, Rewards) else [rewards]
    return torch.tensor(parts, dtype=torch.float64).T


def mean_advantages(advantages: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the target tokens of each completion, `[batch]` float32."""
    mask = token_mask.double()
    # In float64 the mean of equal float32 values is exactly theirs.
    return ((advantages.double() * mask).sum(1) / mask.sum(1).clamp(min=1)).float()


def kl_estimates(
    batch: Mapping[str, torch.Tensor], mask: torch.Tensor, loss: PolicyLossSection
) -> torch.Tensor:
    """Return the KL estimate of each target token before the update, float64, 0 elsewhere.

    Args:
        batch: `prev_logprobs` and `reference_logprobs`, `[batch, seq]`.
        mask: `[batch, seq]`, 1 for target tokens.
        loss: By whose `kl_estimator` and clamps.
    """
    log_ratio = batch["reference_logprobs"].double() - batch["prev_logprobs"].double()
    return estimate_kl(
        torch.where(mask > 0, log_ratio, 0.0),
        estimator=loss.kl_estimator,
        log_ratio_clamp=loss.kl_log_ratio_clamp,
        clamp=loss.kl_clamp,
    )


def _baselined(
    values: torch.Tensor, *, grpo: GrpoSection, weights: Sequence[float]
) -> torch.Tensor:
    """Return rewards, or the parts of each, less the baseline; `[batch]`."""
    if not grpo.group_baseline:
        return values
    group: dict[str, Any] = {
        "group_size": grpo.samples_per_prompt,
        "leave_one_out": grpo.leave_one_out,
        "divide_by_std": grpo.divide_by_std,
    }
    if values.ndim == 2:
        return per_reward_advantages(values, weights=weights, **group)
    return group_relative_advantages(values, **group)
