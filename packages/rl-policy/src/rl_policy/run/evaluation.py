"""Measurements of a policy: the problems it solves, and how far its sampler deviates from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from rl_refit import VerificationError
from rl_refit.report import Stopwatch

from rl_policy.data.datasets import Problem
from rl_policy.data.rewards import RewardError
from rl_policy.run.inputs import ProblemInputs
from rl_policy.run.metrics import HELDOUT_REWARD
from rl_policy.run.samples import SampleLog

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict
    from rl_interfaces import GenerationInterface, GenerationOutputSpec


def greedy_reward(
    source: GenerationInterface,
    problems: Sequence[Problem],
    *,
    inputs: ProblemInputs,
    samples: SampleLog | None = None,
    step: int = 0,
) -> float:
    """Return the mean reward of greedy completions of the problems, see `name_score`.

    Args:
        source: Samples.
        problems: The problems.
        inputs: Of the run.
        samples: Records some of the completions. None: none are.
        step: Of the run, for the record.
    """
    rewards, generated = complete(source, problems, inputs=inputs, greedy=True)
    if samples is not None:
        samples.record(step, "eval", problems, generated, rewards)
    return sum(rewards) / len(rewards)


def heldout_reward(
    moved: AbstractContextManager[GenerationInterface],
    *,
    inputs: ProblemInputs,
    samples: SampleLog,
    step: int,
) -> float:
    """Return the mean reward of greedy completions of the held-out problems, see `name_score`.

    Args:
        moved: Enters what samples, such as `Sampler.after_step`.
        inputs: Of the run.
        samples: Records some of the completions.
        step: Of the run, for the record.
    """
    with moved as source:
        heldout = inputs.problems.heldout
        return greedy_reward(source, heldout, inputs=inputs, samples=samples, step=step)


def name_score(
    value: float | None, *, inputs: ProblemInputs
) -> tuple[float | None, dict[str, float]]:
    """Return a mean reward on held-out problems as `accuracy`, or as the further column `reward`.

    It is an accuracy only if the reward is 1 for a solved problem and 0 for any other.

    Args:
        value: The mean; None if it was not measured.
        inputs: Of the run.

    Returns:
        The accuracy, and further columns.
    """
    if value is None or inputs.measures_solved:
        return value, {}
    return None, {HELDOUT_REWARD: value}


@contextmanager
def measuring_a_step() -> Iterator[None]:
    """Say of a failure of rewards that the policy was trained since the last step on record."""
    try:
        yield
    except RewardError as error:
        error.policy_has_changed = True
        raise


def pass_rate(
    source: GenerationInterface,
    problems: Sequence[Problem],
    *,
    num_samples: int,
    inputs: ProblemInputs,
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
    inputs: ProblemInputs,
    greedy: bool = False,
) -> tuple[Sequence[float], BatchedDataDict[GenerationOutputSpec]]:
    """Return the reward of one completion or episode per problem, and the completions."""
    generated = sample(source, problems, inputs=inputs, greedy=greedy)
    return rewards_of(generated, problems, inputs=inputs), generated


def sample(
    source: GenerationInterface,
    problems: Sequence[Problem],
    *,
    inputs: ProblemInputs,
    group_size: int = 1,
    greedy: bool = False,
    watch: Stopwatch | None = None,
) -> BatchedDataDict[GenerationOutputSpec]:
    """Return a completion of each problem; an episode, where the run has an environment.

    Args:
        source: Samples.
        problems: Each as often as its group is large, one after the other.
        inputs: Of the run.
        group_size: Completions per problem.
        greedy: Take the most likely token every time.
        watch: Counts `generate_s`, and as `reward_s` what environments take.
    """
    watch = watch or Stopwatch()
    if inputs.episodes is not None:
        return inputs.episodes.play(
            source, problems, group_size=group_size, greedy=greedy, watch=watch
        )
    with watch.phase("generate_s"):
        prompts = inputs.encoder.prompt_batch(problems[::group_size])
        return source.generate(prompts.repeat_interleave(group_size), greedy=greedy)


def rewards_of(
    generated: Mapping[str, torch.Tensor], problems: Sequence[Problem], *, inputs: ProblemInputs
) -> Sequence[float]:
    """Return the reward of each row that `sample` returned."""
    if "rewards" in generated:
        return generated["rewards"].tolist()
    return inputs.reward(inputs.encoder.completion_texts(generated), problems)


def sampler_mismatch(
    batch: Mapping[str, torch.Tensor], trainer_logprobs: torch.Tensor
) -> dict[str, float]:
    """Return measures of one batch of samples; all but the first two are 1 and 0 at best.

    Args:
        batch: `generation_logprobs` and `token_mask`, `[batch, seq]`.
        trainer_logprobs: `[batch, seq]`, under the weights that were sampled from.

    Returns:
        `mismatch_mean_abs` and `mismatch_max_abs`: of the differences, in nats.
        `token_mult_prob_error`: mean of exp(|difference|), as NeMo RL reports it; 1 at best.
        `mismatch_kl`: KL(sampler || trainer) per token, k3 estimator (Schulman 2020).
    """
    sampled = batch["token_mask"].bool()
    difference = (trainer_logprobs - batch["generation_logprobs"])[sampled].double()
    if not len(difference):
        raise ValueError("'token_mask' marks no token: there is nothing to compare")
    return {
        "mismatch_mean_abs": float(difference.abs().mean()),
        "mismatch_max_abs": float(difference.abs().max()),
        "token_mult_prob_error": float(difference.abs().exp().mean()),
        "mismatch_kl": float((difference.exp() - 1 - difference).mean()),
    }


def check_mismatch(measured: Mapping[str, float], *, limit: float | None) -> None:
    """Raise if the sampler's weights evidently differ from the trainer's after a refit.

    Args:
        measured: What `sampler_mismatch` returned.
        limit: Most nats that one token may be off. None: any.

    Raises:
        VerificationError: One is off by more.
    """
    worst = measured["mismatch_max_abs"]
    if limit is not None and not worst <= limit:  # NaN compares false, and is a mismatch too
        raise VerificationError(
            f"the engines' log-probabilities are off by up to {worst:.3g} nats, more than "
            f"refit.max_mismatch={limit:g}: their weights are not the trainer's"
        )
