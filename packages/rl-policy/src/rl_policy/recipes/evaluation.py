"""How many problems a policy solves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_policy.recipes.inputs import RunInputs
from rl_policy.recipes.problems import Problem

if TYPE_CHECKING:
    from rl_policy.policy import Policy


def greedy_accuracy(policy: Policy, problems: Sequence[Problem], *, inputs: RunInputs) -> float:
    """Return the share of the problems that are solved by greedy decoding."""
    rewards = _rewards(policy, problems, inputs=inputs, greedy=True)
    return sum(rewards) / len(rewards)


def sampled_reward(policy: Policy, problems: Sequence[Problem], *, inputs: RunInputs) -> float:
    """Return the mean reward of one sampled completion per problem."""
    rewards = _rewards(policy, problems, inputs=inputs, greedy=False)
    return sum(rewards) / len(rewards)


def pass_rate(
    policy: Policy, problems: Sequence[Problem], *, num_samples: int, inputs: RunInputs
) -> float:
    """Return the share of the problems that at least one of several samples solves (pass@k).

    Args:
        policy: Samples.
        problems: The problems.
        num_samples: Samples per problem.
        inputs: Of the run.
    """
    repeated = [problem for problem in problems for _ in range(num_samples)]
    rewards = _rewards(policy, repeated, inputs=inputs, greedy=False)
    best = [max(rewards[at : at + num_samples]) for at in range(0, len(rewards), num_samples)]
    return sum(best) / len(best)


def _rewards(
    policy: Policy, problems: Sequence[Problem], *, inputs: RunInputs, greedy: bool
) -> list[float]:
    policy.prepare_for_generation()
    generated = policy.generate(inputs.encoder.prompt_batch(problems), greedy=greedy)
    policy.finish_generation()
    return inputs.reward(inputs.encoder.completion_texts(generated), problems)
