"""Rewards of completions, and the group-relative advantages computed from them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from rl_policy.data.problems import Problem

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group, in units of reward."""


class ExactMatch:
    """1.0 where the text of a completion's answer is the right answer, otherwise 0.0.

    White space around either text does not count; everything else does, so that a completion
    that lists several answers, or goes on after the right one, gets nothing.

    Example, with `answer_pattern = "= *(-?[0-9]+)"` and the answer "62":
        "27 + 35 = 62"   -> 1.0
        "62"             -> 0.0, the pattern matches nowhere
        "= 62, or = 63"  -> 0.0, the last match is 63

    Args:
        answer_pattern: A regular expression whose last match is the answer: its first group, or
            all of it where it has none. None: the whole completion is.

    Raises:
        ValueError: The pattern is no regular expression.
    """

    def __init__(self, answer_pattern: str | None = None) -> None:
        try:
            self._pattern = None if answer_pattern is None else re.compile(answer_pattern)
        except re.error as error:
            raise ValueError(f"reward.answer_pattern={answer_pattern!r}: {error}") from error

    def __call__(self, completions: Sequence[str], problems: Sequence[Problem]) -> list[float]:
        """Return the reward of each completion of the problem at the same place."""
        return [
            float(self._answer(completion) == problem.answer.strip())
            for completion, problem in zip(completions, problems, strict=True)
        ]

    def _answer(self, completion: str) -> str | None:
        if self._pattern is None:
            return completion.strip()
        matches = list(self._pattern.finditer(completion))
        if not matches:
            return None
        answer = matches[-1].group(1 if self._pattern.groups else 0)
        return None if answer is None else answer.strip()


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
