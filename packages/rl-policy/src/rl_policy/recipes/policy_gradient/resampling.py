"""Dynamic sampling: groups whose completions all have one reward are replaced by others.

From DAPO (Yu et al. 2025), with a bound on how often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces import NOT_SAMPLED

from rl_policy.data.rewards import Rewards
from rl_policy.losses import groups_with_signal
from rl_policy.recipes.policy_gradient.objectives import reward_columns
from rl_policy.recipes.policy_gradient.step import Rollout


def resample(
    sample: Callable[[int], Rollout],
    *,
    num_groups: int,
    group_size: int,
    max_rounds: int,
    each_reward: bool,
    pad_id: int,
) -> tuple[Rollout, dict[str, float]]:
    """Return groups with unequal rewards, sampled in several rounds.

    A round samples as many groups as are missing. After the last one, groups of equal rewards take
    the place of those that are still missing: the number of samples of a step stays the same.

    Example, 4 groups and `max_rounds = 2`; `+` has unequal rewards, `-` equal ones:
        rounds [+ - - +], [- +], [-]
        returned + + + -: 2 rounds more, 3 groups dropped, 1 kept without a signal

    Args:
        sample: Returns the completions of the next problems, given the number of groups.
        num_groups: To return.
        group_size: Completions per group.
        max_rounds: Most rounds after the first.
        each_reward: Whether unequal parts of equal rewards are a signal too.
        pad_id: Pads completions of different lengths.

    Returns:
        The completions, and as metrics `dynamic_rounds` (rounds after the first),
        `dynamic_dropped_groups`, `dynamic_unfilled_groups` (without a signal, and yet returned)
        and `dynamic_reward_mean` (of all that was sampled).
    """
    kept: list[Rollout] = []
    rest: list[Rollout] = []
    sampled: list[float] = []
    missing, rounds = num_groups, -1
    while missing and rounds < max_rounds:
        rounds += 1
        rollout = sample(missing)
        sampled += rollout.rewards
        # A list of its sums alone has no parts.
        compared = reward_columns(rollout.rewards if each_reward else [*rollout.rewards])
        has_signal = groups_with_signal(compared, group_size=group_size)
        kept.append(_select(rollout, has_signal, group_size=group_size))
        # A round samples as many as are missing: what it leaves is what is missing after it.
        rest = [_select(rollout, ~has_signal, group_size=group_size)]
        missing -= int(has_signal.sum())
    measured = {
        "dynamic_rounds": float(rounds),
        "dynamic_dropped_groups": float(len(sampled) // group_size - num_groups),
        "dynamic_unfilled_groups": float(missing),
        "dynamic_reward_mean": sum(sampled) / len(sampled),
    }
    return _join([*kept, *rest], pad_id=pad_id), measured


def _select(rollout: Rollout, is_kept: torch.Tensor, *, group_size: int) -> Rollout:
    """Return the rows of some of the groups."""
    rows: list[int] = is_kept.repeat_interleave(group_size).nonzero()[:, 0].tolist()
    rewards = rollout.rewards
    chosen: Sequence[float] = [rewards[row] for row in rows]
    if isinstance(rewards, Rewards):
        parts = {name: [values[row] for row in rows] for name, values in rewards.parts.items()}
        chosen = Rewards(chosen, parts)
    return Rollout(
        problems=[rollout.problems[row] for row in rows],
        generated=rollout.generated.select_indices(rows),
        rewards=chosen,
    )


def _join(rollouts: Sequence[Rollout], *, pad_id: int) -> Rollout:
    filled = [each for each in rollouts if each.problems]
    rewards: Sequence[float] = [value for each in filled for value in each.rewards]
    parts: dict[str, list[float]] = {}
    for each in filled:
        if isinstance(each.rewards, Rewards):
            for name, values in each.rewards.parts.items():
                parts.setdefault(name, []).extend(values)
    return Rollout(
        problems=[problem for each in filled for problem in each.problems],
        generated=BatchedDataDict.from_batches(
            [each.generated for each in filled],
            {"output_ids": pad_id, "weight_versions": NOT_SAMPLED},
        ),
        rewards=Rewards(rewards, parts) if parts else rewards,
    )
