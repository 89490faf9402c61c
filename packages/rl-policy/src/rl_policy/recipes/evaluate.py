"""Measure a model on problems with verifiable answers: reward, accuracy and pass@k.

The engines of vLLM sample where it is installed, otherwise the training workers. The run directory
holds metrics.jsonl, with a line, and completions.jsonl, with every completion and its reward.

pass@k: the estimator without bias of Chen et al. 2021, "Evaluating large language models trained on
code".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import comb
from typing import Annotated, ClassVar

from pydantic import Field
from rl_interfaces.config.schema import MOST
from rl_refit.report import Stopwatch

from rl_policy.backends import WORKERS_OWN
from rl_policy.config import RewardSection, RunConfig, Section
from rl_policy.data.batches import ProblemEncoder
from rl_policy.data.rewards import mean_parts
from rl_policy.recipes import Recipe
from rl_policy.run.directory import write_durably
from rl_policy.run.inputs import ProblemInputs, check_sampling, prepare_problems
from rl_policy.run.metrics import StepMetrics
from rl_policy.run.samplers import open_source
from rl_policy.run.session import Session


class EvalSection(Section):
    """Measurement of a model."""

    samples: int = Field(default=1, ge=1, le=MOST)
    """Completions of each problem."""
    pass_at: list[Annotated[int, Field(ge=1, le=MOST)]] | None = Field(default=None, min_length=1)
    """The k of pass@k: the probability that one of k samples solves a problem. null: 1 and
    eval.samples."""
    greedy: bool | None = None
    """Take the most likely token every time. null: where eval.samples is 1."""
    solved_at: float = 1.0
    """Least reward of a completion that solves its problem."""
    limit: int | None = Field(default=None, ge=1, le=MOST)
    """Measure the first problems alone. null: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalMetrics(StepMetrics):
    """What is measured; `extra` has pass@k, and the mean of each reward function.

    Attributes:
        accuracy: Share of the completions that solve their problem.
        reward_mean: Mean reward of the completions.
        problems: Problems.
        completion_length_mean: Mean number of tokens of the completions.
        truncated_share: Share of the completions that `max_new_tokens` has ended.
        generate_s: Seconds of sampling.
        reward_s: Seconds of texts and rewards.
    """

    accuracy: float | None = None
    reward_mean: float | None = None
    problems: float | None = None
    completion_length_mean: float | None = None
    truncated_share: float | None = None
    generate_s: float | None = None
    reward_s: float | None = None
    score_column: ClassVar[str | None] = "accuracy"
    headline: ClassVar[Mapping[str, str]] = {"accuracy": "accuracy", "reward": "reward_mean"}


def check_eval(config: RunConfig) -> None:
    """Raise `ValueError` if keys contradict each other."""
    check_sampling(config)
    section = config.section(EvalSection)
    for k in section.pass_at or ():
        if k > section.samples:
            raise ValueError(
                f"eval.pass_at={section.pass_at} needs {k} samples of a problem, and eval.samples="
                f"{section.samples}"
            )
    if section.greedy and section.samples > 1:
        raise ValueError(
            f"eval.greedy=True makes the eval.samples={section.samples} of a problem equal"
        )
    if config.data.heldout_path is not None:
        raise ValueError(
            f"data.heldout_path={config.data.heldout_path} is for a training: name the problems by "
            "data.path"
        )


def prepare_eval(config: RunConfig, encoder: ProblemEncoder) -> ProblemInputs:
    """Return the problems of the run, none of which is held out.

    Raises:
        ValueError: They cannot be read, or do not fit.
    """
    if not config.has_builtin_model and config.data.path is None:
        raise ValueError("data.path is not set: the problems to measure a model on")
    return prepare_problems(config, encoder, is_measured_only=True)


def run_eval(session: Session[ProblemInputs], model: str) -> None:
    """Measure a model, and write the measurements to the run's directory."""
    config, inputs = session.config, session.inputs
    section = config.section(EvalSection)
    problems = [
        problem
        for problem in inputs.problems.heldout[: section.limit]
        for _ in range(section.samples)
    ]
    greedy = section.samples == 1 if section.greedy is None else section.greedy
    watch = Stopwatch()
    with open_source(session, model=model) as source, watch.phase("generate_s"):
        generated = source.generate(inputs.encoder.prompt_batch(problems), greedy=greedy)
    with watch.phase("reward_s"):
        texts = inputs.encoder.completion_texts(generated)
        rewards = inputs.reward(texts, problems)
    limit = config.policy["generation"]["max_new_tokens"]
    metrics = EvalMetrics(
        step=0,
        accuracy=sum(reward >= section.solved_at for reward in rewards) / len(rewards),
        reward_mean=sum(rewards) / len(rewards),
        problems=len(problems) // section.samples,
        completion_length_mean=float(generated["generation_lengths"].double().mean()),
        truncated_share=inputs.encoder.truncated_share(generated, max_new_tokens=limit),
        generate_s=watch.of("generate_s"),
        reward_s=watch.of("reward_s"),
        extra={**_pass_rates(rewards, section), **mean_parts(rewards)},
    )
    lines = [
        json.dumps(
            {"prompt": each.prompt, "answer": each.answer, "completion": text, "reward": reward}
        )
        for each, text, reward in zip(problems, texts, rewards, strict=True)
    ]
    write_durably(session.directory.completions, "".join(line + "\n" for line in lines))
    session.record(metrics)
    session.samples.record(0, "eval", problems, generated, rewards)


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the probability that one of `k` samples, drawn from those of a problem, solves it.

    Example:
        pass_at_k(4, 1, k=2)  -> 0.5: three of the six pairs have the one that does

    Args:
        num_samples: Samples of the problem.
        num_solved: Those that solve it.
        k: At most `num_samples`.
    """
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def _pass_rates(rewards: Sequence[float], section: EvalSection) -> dict[str, float]:
    count = section.samples
    groups = [rewards[at : at + count] for at in range(0, len(rewards), count)]
    solved = [sum(reward >= section.solved_at for reward in group) for group in groups]
    return {
        f"pass@{k}": sum(pass_at_k(count, each, k) for each in solved) / len(solved)
        for k in sorted(set(section.pass_at or (1, count)))
    }


EVAL = Recipe(
    name="eval",
    sections={"eval": EvalSection, "reward": RewardSection},
    metrics=EvalMetrics,
    prepare=prepare_eval,
    run=run_eval,
    check=check_eval,
    defaults={"generation": {"backend": "vllm" if find_spec("vllm") else WORKERS_OWN}},
    samples_with_engines=True,
)
