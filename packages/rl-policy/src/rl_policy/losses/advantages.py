"""Advantages of sampled completions, which `ClippedPGLoss` weighs their tokens by.

Rewards are `[batch]`; the completions of a prompt, its group, are adjacent. An advantage is of a
completion, `[batch]`, or of each of its tokens, `[batch, seq]`. With a value model, rewards and
values are of each token too, see `generalized_advantages`.

All is computed in float64: what goes into a batch becomes float32 there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group or a batch, in units of reward."""


def _dtype_of(rewards: torch.Tensor) -> torch.dtype:
    return torch.promote_types(rewards.dtype, torch.float32)


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
        `[batch]`, computed in float64, of the dtype of the rewards, float32 at least.

    Raises:
        ValueError: `group_size` is below 2, or does not divide the batch.
    """
    if group_size < 2:
        raise ValueError(f"group_size={group_size} must be at least 2: there is nothing to compare")
    if rewards.shape[0] % group_size:
        raise ValueError(f"group_size={group_size} does not divide {rewards.shape[0]} rewards")
    # In float64: rewards that are large and nearly equal would be equal in float32.
    groups = rewards.double().view(-1, group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    # The mean of equal rewards is rounded: without this, `std` would amplify the rounding error.
    is_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    advantages = advantages.masked_fill(is_equal, 0.0)
    if leave_one_out:
        # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
        advantages = advantages * (group_size / (group_size - 1))
    if divide_by_std:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + STD_EPSILON)
    return advantages.view(-1).to(_dtype_of(rewards))


def per_reward_advantages(
    rewards: torch.Tensor,
    *,
    weights: Sequence[float],
    group_size: int,
    leave_one_out: bool = False,
    divide_by_std: bool = True,
) -> torch.Tensor:
    """Return the weighted sum of the advantages that each of several rewards gives on its own.

    GDPO (Liu et al. 2026) normalises before it sums: a reward of a wide range then does not drown
    one of a narrow range, and combinations of rewards of one sum keep distinct advantages. The
    paper whitens the sums over the batch, see `whiten`.

    Example, two rewards of one group, `[1, 0]` and `[0, 10]`, `weights = [1, 1]`:
        standard deviations 0.7071 and 7.071: [0.7071, -0.7071] + [-0.7071, 0.7071] = [0, 0]
        the sums [1, 10] alone would give [-0.7071, 0.7071]

    Args:
        rewards: `[batch, rewards]`, any float.
        weights: One for each reward.
        group_size: Completions per prompt, at least 2.
        leave_one_out: As in `group_relative_advantages`.
        divide_by_std: The same.

    Returns:
        `[batch]`, computed in float64, of the dtype of the rewards, float32 at least.

    Raises:
        ValueError: The numbers of rewards and weights differ, or `group_size` is wrong.
    """
    if rewards.shape[1] != len(weights):
        raise ValueError(f"{len(weights)} weights were given for {rewards.shape[1]} rewards")
    total = torch.zeros(rewards.shape[0], dtype=torch.float64)
    for column, weight in zip(rewards.unbind(dim=1), weights, strict=True):
        total += weight * group_relative_advantages(
            column.double(),
            group_size=group_size,
            leave_one_out=leave_one_out,
            divide_by_std=divide_by_std,
        )
    return total.to(_dtype_of(rewards))


def whiten(
    advantages: torch.Tensor, mask: torch.Tensor | None = None, *, correction: int = 0
) -> torch.Tensor:
    """Return advantages less their mean over the batch, divided by their standard deviation.

    REINFORCE++ (Hu 2025) whitens over the target tokens of a batch, so that a long completion
    counts more often; GDPO over its completions, with `correction=1`. Equal values get zeros.

    Example, `advantages = [1, 0, 0, 0]` without a mask, mean 0.25, variance 0.1875:
        [1.7321, -0.5774, -0.5774, -0.5774]

    Args:
        advantages: `[batch]` or `[batch, seq]`, any float.
        mask: Of the same shape, 1 where a value counts. None: all do.
        correction: The variance is divided by the count less this, 0 or 1.

    Returns:
        A tensor of the same shape, computed in float64, of the dtype of the advantages, float32 at
        least; 0 where the mask is.
    """
    counted = torch.ones_like(advantages) if mask is None else mask
    values, weights = advantages.double(), counted.double()
    count = weights.sum()
    mean = (values * weights).sum() / count.clamp(min=1)
    centred = (values - mean) * weights
    std = ((centred**2).sum() / (count - correction).clamp(min=1)).sqrt()
    valid = values[weights > 0]
    # The mean of equal values is rounded: `std` would amplify the rounding error.
    if not len(valid) or bool((valid == valid[0]).all()):
        return torch.zeros_like(values, dtype=_dtype_of(advantages))
    return (centred / (std + STD_EPSILON)).to(_dtype_of(advantages))


def groups_with_signal(rewards: torch.Tensor, *, group_size: int) -> torch.Tensor:
    """Return which groups have unequal rewards, and so advantages that are not all zero.

    Dynamic sampling of DAPO (Yu et al. 2025) samples other prompts in place of the rest.

    Args:
        rewards: `[batch]`, or `[batch, rewards]`, of which any may be unequal.
        group_size: Completions per prompt.

    Returns:
        `[batch / group_size]`, bool.
    """
    groups = rewards.reshape(-1, group_size, 1 if rewards.ndim == 1 else rewards.shape[1])
    return (groups != groups[:, :1]).flatten(1).any(dim=1)


def overlong_penalties(lengths: torch.Tensor, *, max_length: int, buffer: float) -> torch.Tensor:
    """Return the soft penalty for completions near the limit of tokens (DAPO, equation 13).

    Example, `max_length = 100` and `buffer = 20`:
        lengths   80, 85, 90, 100
        penalties 0, -0.25, -0.5, -1

    Args:
        lengths: `[batch]`, tokens of the completions.
        max_length: The most tokens of a completion.
        buffer: The tokens before that limit over which the penalty grows, above 0.

    Returns:
        `[batch]` float64, in [-1, 0].
    """
    excess = lengths.double() - (max_length - buffer)
    return -(excess / buffer).clamp(0, 1)


def reward_to_go_penalty(penalties: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum of the penalties of each target token and those after it.

    It is what REINFORCE++ (Hu 2025) subtracts from the advantage of a token: a penalty is no
    consequence of the tokens after it.

    Example, `penalties = [9, 1, 2, 3]`, `mask = [0, 1, 0, 1]`:
        [4, 4, 3, 3]

    Args:
        penalties: `[batch, seq]`, any float.
        mask: `[batch, seq]`, 1 for target tokens.

    Returns:
        `[batch, seq]` float64.
    """
    masked = torch.where(mask > 0, penalties.double(), 0.0)
    return masked.flip(1).cumsum(1).flip(1)


def token_values(scores: torch.Tensor) -> torch.Tensor:
    """Return the value of the state in which each token is sampled, `[batch, seq]`.

    Args:
        scores: `[batch, seq]` of `Policy.score` under `head: value`: column `t` is the value after
            token `t`. Column `t` of what is returned is of token `t`, and column 0 is 0.
    """
    return torch.nn.functional.pad(scores[:, :-1], (1, 0))


def token_rewards(
    rewards: torch.Tensor, mask: torch.Tensor, penalties: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the reward of each token: that of a completion at its last target token.

    Example, `rewards = [1]`, `mask = [[0, 1, 1, 0]]`, `penalties = [[9, 0.1, 0.2, 9]]`:
        [[0, -0.1, 0.8, 0]]

    Args:
        rewards: `[batch]`, any float.
        mask: `[batch, seq]`, 1 for target tokens. A row without any gets no reward.
        penalties: `[batch, seq]`, subtracted at the target tokens, as in Ziegler et al. 2019. None:
            there are none.

    Returns:
        `[batch, seq]` float64.
    """
    is_target = mask > 0
    # The last target is the one after which there is no other.
    is_last = is_target & (is_target.flip(1).cumsum(1).flip(1) == 1)
    tokens = torch.where(is_last, rewards.double()[:, None], 0.0)
    if penalties is not None:
        tokens = tokens - torch.where(is_target, penalties.double(), 0.0)
    return tokens


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantage of each target token, and its return, which a value model learns.

    Generalized advantage estimation (Schulman et al. 2016, equation 16). `t + 1` is the next target
    token, so that the observations between the turns of an episode take no time. There is no value
    after the last one, whether the model has ended there or a limit of tokens has:

        delta[t] = r[t] + gamma * V[t + 1] - V[t]
        A[t] = delta[t] + gamma * lam * A[t + 1]
        R[t] = A[t] + V[t]

    Example, two targets, `r = [0, 1]`, `V = [0.5, 0.6]`, `gamma = 1`, `lam = 0.5`:
        delta = [0.1, 0.4], A = [0.3, 0.4], R = [0.8, 1.0]

    Args:
        rewards: `[batch, seq]`, any float, see `token_rewards`.
        values: `[batch, seq]`, of the state in which each token is sampled, see `token_values`.
        mask: `[batch, seq]`, 1 for target tokens.
        gamma: Discount of a token, in [0, 1].
        lam: Between 0, whose advantages rely on the value of the next token alone, and 1, which
            sums all rewards.

    Returns:
        Advantages and returns, `[batch, seq]` of the dtype of the rewards; 0 where there is no
        target.
    """
    is_target = mask > 0
    # In float64: an error of a value is carried through all tokens before it.
    reward, value = rewards.double(), values.double()
    advantages = torch.zeros_like(value)
    running = next_value = torch.zeros_like(value[:, 0])
    for at in reversed(range(value.shape[1])):
        delta = reward[:, at] + gamma * next_value - value[:, at]
        running = torch.where(is_target[:, at], delta + gamma * lam * running, running)
        next_value = torch.where(is_target[:, at], value[:, at], next_value)
        advantages[:, at] = torch.where(is_target[:, at], running, 0.0)
    returns = torch.where(is_target, advantages + value, 0.0)
    return advantages.to(_dtype_of(rewards)), returns.to(_dtype_of(rewards))


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the share of the variance of returns that values explain: 1 at best.

    0 is that of a constant; below it, values are worse than none. NaN where all returns are equal.

    Example, `values = [0, 1, 1]`, `returns = [0, 1, 2]`:
        the variance of the differences is 2/9, that of the returns 2/3: 1 - 1/3 = 0.6667

    Args:
        values: `[batch, seq]`, before the update.
        returns: `[batch, seq]`.
        mask: `[batch, seq]`, 1 for target tokens.
    """
    is_target = mask > 0
    known, total = values[is_target].double(), returns[is_target].double()
    if not len(total) or bool((total == total[0]).all()):
        return float("nan")
    return 1 - float((total - known).var(correction=0) / total.var(correction=0))
