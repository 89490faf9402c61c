"""How many problems a policy solves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_policy.recipes.inputs import RunInputs
from rl_policy.recipes.problems import Problem

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict
    from rl_interfaces import GenerationInterface, GenerationOutputSpec


def greedy_accuracy(
    source: GenerationInterface, problems: Sequence[Problem], *, inputs: RunInputs
) -> float:
    """Return the share of the problems that are solved by greedy decoding."""
    rewards, _ = complete(source, problems, inputs=inputs, greedy=True)
    return sum(rewards) / len(rewards)


def pass_rate(
    source: GenerationInterface, problems: Sequence[Problem], *, num_samples: int, inputs: RunInputs
) -> float:
    """Return the share of the problems that at least one of several samples solves (pass@k).

    Args:
        source: Samples.
        problems: The problems.
        num_samples: Samples per problem.
        inputs: Of the run.
    """
    repeated = [problem for problem in problems for _ in range(num_samples)]
    rewards, _ = complete(source, repeated, inputs=inputs)
    best = [max(rewards[at : at + num_samples]) for at in range(0, len(rewards), num_samples)]
    return sum(best) / len(best)


def complete(
    source: GenerationInterface,
    problems: Sequence[Problem],
    *,
    inputs: RunInputs,
    greedy: bool = False,
) -> tuple[list[float], BatchedDataDict[GenerationOutputSpec]]:
    """Return the reward of one completion per problem, and the completions."""
    generated = source.generate(inputs.encoder.prompt_batch(problems), greedy=greedy)
    return inputs.reward(inputs.encoder.completion_texts(generated), problems), generated
