"""Group-relative advantages: how much better a completion is than the others of its prompt."""

from __future__ import annotations

import torch

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group, in units of reward."""


def group_relative_advantages(
    rewards: torch.Tensor,
    *,
    group_size: int,
    leave_one_out: bool = False,
    divide_by_std: bool = True,
) -> torch.Tensor:
    """Return the advantage of each completion; a group of equal rewards gets zeros.

    GRPO (Shao et al. 2024) takes `(r - mean) / std` over the completions of one prompt. Without the
    division it is the estimator of Dr. GRPO (Liu et al. 2025); with the mean over the *other*
    completions as baseline it is RLOO (Ahmadian et al. 2024).

    Example, `rewards = [1, 0, 0, 0]` and `group_size = 4`, standard deviation (n - 1) 0.5:
        default                                  [ 1.5, -0.5, -0.5, -0.5]
        divide_by_std=False                      [0.75, -0.25, -0.25, -0.25]
        leave_one_out=True, divide_by_std=False  [ 1.0, -1/3, -1/3, -1/3]

    Args:
        rewards: `[batch]`, any float; the completions of a prompt stand side by side.
        group_size: Completions per prompt, at least 2.
        leave_one_out: Leave a completion's own reward out of its baseline.
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
    # A mean that is rounded must not turn a group of equal rewards into advantages.
    is_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    advantages = advantages.masked_fill(is_equal, 0.0)
    if leave_one_out:
        advantages = advantages * (group_size / (group_size - 1))
    if divide_by_std:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + STD_EPSILON)
    return advantages.view(-1)
