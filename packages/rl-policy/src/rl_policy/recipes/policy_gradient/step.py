"""What a step of the policy gradient consists of: sample, reward, score, train; for GRPO and PPO.

Their sections are those of `config`. How advantages come about, and what else there
is beside the policy, is the recipe's own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from rl_interfaces import GenerationInterface, LossFunction
from rl_refit.report import Stopwatch

from rl_policy.config import EnvironmentSection, RefitSection, RunConfig, Settings
from rl_policy.data.batches import Batch, ProblemEncoder, completion_batch
from rl_policy.data.datasets import Problem
from rl_policy.data.rewards import mean_parts
from rl_policy.policy import Policy
from rl_policy.recipes.policy_gradient.config import (
    PolicyGradientSection,
    PolicyLossSection,
    has_warm_up,
)
from rl_policy.recipes.policy_gradient.objectives import mean_advantages
from rl_policy.recipes.sft import fine_tune, prepare_sft
from rl_policy.run.directory import RunState
from rl_policy.run.evaluation import (
    check_mismatch,
    complete,
    greedy_reward,
    name_score,
    rewards_of,
    sample,
    sampler_mismatch,
)
from rl_policy.run.flops import DeviceSpeed
from rl_policy.run.inputs import (
    ProblemInputs,
    check_schedule,
    prepare_episodes,
    prepare_problems,
    warn_of_repeated,
)
from rl_policy.run.metrics import StepMetrics, mean_metrics
from rl_policy.run.samplers import Sampler, open_sampler
from rl_policy.run.samples import SampleLog
from rl_policy.run.session import Session, open_policy

_LOGGER = logging.getLogger(__name__)

PHASES = ("step_s", "move_s", "generate_s", "reward_s", "logprob_s", "train_s")
"""The columns of times that a stopwatch of a step measures."""
DIAGNOSTICS = (
    "clip_fraction",
    "importance_outside",
    "policy_loss",
    "probs_ratio",
    "sampler_trainer_ratio",
)
"""Metrics of `ClippedPGLoss` that are for trackers alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradientMetrics(StepMetrics):
    """The metrics of a step that all recipes of the policy gradient have; None if not measured.

    With engines, `extra` has the report of the refit whose weights generated the samples
    (`refit_bytes`, `refit_bytes_sent`, `refit_load_s` ..., and with `refit.delta` `refit_changed`,
    the share of the weights that the step before has changed), its `weight_version`, and the
    mismatch of the engines' log-probabilities with the trainer's (`mismatch_mean_abs` ..., see
    `sampler_mismatch`). With an environment it has what `episode_metrics` does.

    Attributes:
        reward_mean: Mean reward of the samples; at step 0, of one per held-out problem.
        reward_std: Standard deviation of the samples' rewards, of all prompts together.
        completion_length_mean: Mean number of tokens of the completions.
        completion_length_max: The most tokens of a completion.
        truncated_share: Share of the completions that `max_new_tokens` has ended; of episodes,
            those in which a limit of tokens has ended a turn or the episode.
        accuracy: Fraction of the held-out problems that greedy decoding solves after the step. If
            the reward is not 1 for a solved problem and 0 for any other, `extra` has the mean
            `reward` of the greedy completions instead.
        loss: Mean over the optimizer steps.
        grad_norm: Mean over the optimizer steps, before clipping.
        kl: KL against the reference per token, by `loss.kl_estimator`.
        entropy: Of the policy per token in nats, estimated from the sampled tokens.
        tokens_per_s: Tokens of prompts and completions per second of the step.
        tokens_per_s_per_device: The same for each device of policy and engines.
        tflops_per_s_per_device: Model TFLOPs of the optimizer steps per second of `train_s` and
            device of the policy, see `rl_policy.run.flops`.
        mfu: Model FLOPs utilization: these over the peak of the device; None if no peak is known.
        peak_memory_gib: The most memory that a rank of the policy has had allocated since the
            start: of its device, without one of its process.
        step_s: Seconds of the step, without evaluation.
        move_s: Seconds of moving state on and off the devices and of handing them over between
            policy and engines, without the refit.
        generate_s: Seconds of sampling.
        reward_s: Seconds of completions' texts, rewards and advantages, and of environments.
        logprob_s: Seconds of old and reference log-probabilities.
        train_s: Seconds of the policy's optimizer steps.
        refit_s: Seconds of sending weights to inference engines; 0.0 without engines.
    """

    reward_mean: float | None = None
    reward_std: float | None = None
    completion_length_mean: float | None = None
    completion_length_max: float | None = None
    truncated_share: float | None = None
    accuracy: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    kl: float | None = None
    entropy: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    tflops_per_s_per_device: float | None = None
    mfu: float | None = None
    peak_memory_gib: float | None = None
    step_s: float | None = None
    move_s: float | None = None
    generate_s: float | None = None
    reward_s: float | None = None
    logprob_s: float | None = None
    train_s: float | None = None
    refit_s: float = 0.0
    score_column: ClassVar[str | None] = "accuracy"
    headline: ClassVar[Mapping[str, str]] = {"reward": "reward_mean", "accuracy": "accuracy"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Completions of some problems, each as often as its group is large.

    Attributes:
        problems: Of each row.
        generated: A `GenerationOutputSpec`, `[batch, seq]`.
        rewards: Of each row.
    """

    problems: Sequence[Problem]
    generated: Batch
    rewards: Sequence[float]


def prepare_rollouts(config: RunConfig, encoder: ProblemEncoder) -> ProblemInputs:
    """Return the problems of the run, also checked for the warm-up if there is one.

    Raises:
        ValueError: They cannot be read or do not fit, or a schedule ends too early.
    """
    num_steps, key = schedule_length(config)
    check_schedule(config.policy, num_steps=num_steps, key=key)
    if has_warm_up(config):
        inputs = prepare_sft(config, encoder)
    else:
        has_environment = config.section(EnvironmentSection).function is not None
        inputs = prepare_problems(config, encoder, has_environment=has_environment)
    warn_of_repeated(inputs.problems.train)
    return prepare_episodes(config, inputs)


def schedule_length(config: RunConfig) -> tuple[int, str]:
    """Return the calls of `train` of a run, and the keys that set them."""
    section = config.section(PolicyGradientSection)
    keys = ", ".join(
        f"{config.recipe}.{name}={getattr(section, name)}" for name in ("steps", "epochs_per_step")
    )
    return section.steps * section.epochs_per_step, keys


def warm_up(session: Session[ProblemInputs], model: str) -> str:
    """Fine-tune the model that the run starts from if it has a warm-up; return what follows it."""
    warn_of_truncation(session.config.policy["generation"])
    if has_warm_up(session.config):
        # What is trained next starts in the warm-up's processes.
        with session.cluster.spare_hosts.keeping():
            return fine_tune(session, session.directory.warm_up, model=model)
    return model


@contextmanager
def open_sampled_policy(
    session: Session[ProblemInputs], model: str, *, is_trained: bool = True
) -> Iterator[tuple[Policy, Sampler, RunState]]:
    """Yield the policy, with a reference if the loss needs it, what samples, and the run's state.

    Args:
        session: The run.
        model: Name or directory of the model to start from, which is the reference too.
        is_trained: Whether the policy has an optimizer and a reference.
    """
    config = session.config
    has_reference = is_trained and config.section(PolicyLossSection).kl_coef > 0
    with (
        open_policy(
            session, config.policy, model=model, has_reference=has_reference, is_trained=is_trained
        ) as (policy, start),
        open_sampler(session, policy, model=model, start=start) as sampler,
    ):
        yield policy, sampler, start


def warn_of_truncation(generation: Settings) -> None:
    """Log a warning if `policy.generation` truncates the distribution that the trainer scores."""
    untruncated = {"top_k": None, "top_p": 1.0}
    truncations = [
        f"policy.generation.{key}={generation[key]}"
        for key, off in untruncated.items()
        if generation.get(key, off) != off
    ]
    if truncations:
        _LOGGER.warning(
            "%s: completions are sampled from a truncated distribution, whose log-probabilities "
            "differ from the trainer's; sampler_trainer_ratio in a tracker of logger measures by "
            "how much",
            " and ".join(truncations),
        )


def draw_rollout(
    source: GenerationInterface,
    drawn: Sequence[Problem],
    *,
    inputs: ProblemInputs,
    group_size: int,
    watch: Stopwatch,
) -> Rollout:
    """Sample a group of completions of each problem, and reward them."""
    problems = [problem for problem in drawn for _ in range(group_size)]
    generated = sample(source, problems, inputs=inputs, group_size=group_size, watch=watch)
    return reward_rollout(problems, generated, inputs=inputs, watch=watch)


def reward_rollout(
    problems: Sequence[Problem], generated: Batch, *, inputs: ProblemInputs, watch: Stopwatch
) -> Rollout:
    """Return completions with their rewards, of the problem at the same index each."""
    with watch.phase("reward_s"):
        rewards = rewards_of(generated, problems, inputs=inputs)
    return Rollout(problems=problems, generated=generated, rewards=rewards)


def valid_rewards(rewards: Sequence[float], generated: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the rewards less those of episodes that have failed, float64."""
    values = torch.tensor(rewards, dtype=torch.float64)
    return values[generated["sample_mask"].bool()] if "sample_mask" in generated else values


def describe_completions(
    rewards: Sequence[float],
    generated: Mapping[str, torch.Tensor],
    *,
    encoder: ProblemEncoder,
    max_new_tokens: int,
) -> dict[str, float]:
    """Return the columns that describe the completions of a step and their rewards."""
    values = valid_rewards(rewards, generated)
    lengths = generated["generation_lengths"].double()
    return {
        "reward_mean": float(values.mean()),
        "reward_std": float(values.std()),
        "completion_length_mean": float(lengths.mean()),
        "completion_length_max": float(lengths.max()),
        "truncated_share": encoder.truncated_share(generated, max_new_tokens=max_new_tokens),
    }


class BatchScorer:
    """Adds the log-probabilities before the update to the batch of a step.

    Args:
        config: Of the run.
        policy: Scores, and has a reference if the loss needs it.
    """

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        self._is_own = config.section(PolicyGradientSection).old_logprobs == "trainer"
        self._has_reference = config.section(PolicyLossSection).kl_coef > 0
        self._has_engines = config.has_engines
        self._max_mismatch = config.section(RefitSection).max_mismatch
        self._policy = policy

    def score(self, batch: Batch, watch: Stopwatch) -> dict[str, float]:
        """Add `prev_logprobs` and, if the loss needs them, `reference_logprobs`, `[batch, seq]`.

        Returns:
            The mismatch of engines' and trainer's log-probabilities; empty without engines.
        """
        mismatch: dict[str, float] = {}
        if self._is_own or self._has_engines or self._has_reference:
            with watch.phase("move_s"):
                self._policy.prepare_for_lp_inference()
        with watch.phase("logprob_s"):
            if self._is_own or self._has_engines:
                scored = self._policy.get_logprobs(batch)
                scores = scored["logprobs"]
                if "routed_experts" in scored:
                    batch["routed_experts"] = scored["routed_experts"]
                batch["prev_logprobs"] = scores if self._is_own else batch["generation_logprobs"]
                if self._has_engines:
                    mismatch = self._mismatch(batch, scores)
            else:
                batch["prev_logprobs"] = batch["generation_logprobs"]
            if self._has_reference:
                reference = self._policy.get_reference_policy_logprobs(batch)
                batch["reference_logprobs"] = reference["reference_logprobs"]
        return mismatch

    def score_start(self, generated: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the mismatch before the first update; empty without engines.

        A difference is then due to the engines or to the refit alone.
        """
        if not self._has_engines:
            return {}
        self._policy.prepare_for_lp_inference()
        batch = completion_batch(generated)
        return self._mismatch(batch, self._policy.get_logprobs(batch)["logprobs"])

    def _mismatch(self, batch: Batch, trainer_logprobs: torch.Tensor) -> dict[str, float]:
        measured = sampler_mismatch(batch, trainer_logprobs)
        check_mismatch(measured, limit=self._max_mismatch)
        return measured


def train_epochs(
    policy: Policy,
    batch: Batch,
    loss: LossFunction,
    *,
    num_epochs: int,
    watch: Stopwatch,
    phase: str = "train_s",
) -> dict[str, float]:
    """Train on the batch of a step; return the means of the metrics.

    What the batch holds from before the update is not computed anew: from the second optimizer step
    on, ratios differ from 1 and are clipped.

    Args:
        policy: What is trained.
        batch: `[batch, seq]`.
        loss: The loss.
        num_epochs: Over the batch.
        watch: Counts.
        phase: As what it counts the optimizer steps.
    """
    with watch.phase("move_s"):
        policy.prepare_for_training()
    with watch.phase(phase):
        epochs = [mean_metrics(policy.train(batch, loss)) for _ in range(num_epochs)]
    with watch.phase("move_s"):
        policy.finish_training()
    return {name: sum(each[name] for each in epochs) / len(epochs) for name in epochs[0]}


def step_columns(
    policy: Policy,
    batch: Batch,
    trained: Mapping[str, float],
    *,
    speed: DeviceSpeed,
    num_epochs: int,
    watch: Stopwatch,
) -> dict[str, Any]:
    """Return the columns of a step's training, its speed and its times.

    Args:
        policy: What was trained.
        batch: Of the step.
        trained: What `train_epochs` has returned.
        speed: Of the run.
        num_epochs: Over the batch.
        watch: Has counted the phases.
    """
    return {
        "peak_memory_gib": policy.peak_memory_gib(),
        **speed.measure(
            batch["input_lengths"],
            step_s=watch.of("step_s"),
            train_s=watch.of("train_s"),
            num_epochs=num_epochs,
        ),
        **{name: trained[name] for name in ("loss", "grad_norm", "entropy")},
        "kl": trained.get("kl"),
        **{name: watch.of(name) for name in PHASES},
    }


def record_rollout(samples: SampleLog, step: int, rollout: Rollout, batch: Batch) -> None:
    """Record some of the completions that a step was trained on, with their advantages."""
    samples.record(
        step,
        "train",
        rollout.problems,
        rollout.generated,
        rollout.rewards,
        advantages=mean_advantages(batch["advantages"], batch["token_mask"]),
    )


def measure_start(
    moved: AbstractContextManager[GenerationInterface],
    sampler: Sampler,
    scorer: BatchScorer,
    *,
    inputs: ProblemInputs,
    samples: SampleLog,
) -> dict[str, Any]:
    """Return what is measured before the first update, both on held-out problems.

    Args:
        moved: Enters what samples.
        sampler: Of which it is.
        scorer: Of the run.
        inputs: Of the run.
        samples: Records some of the completions.

    Returns:
        `reward_mean` of one sample per problem, `accuracy` of greedy decoding, and `extra`; the
        latter has `reward` in the place of the accuracy where there is none, see `name_score`.
    """
    heldout = inputs.problems.heldout
    with moved as source:
        rewards, generated = complete(source, heldout, inputs=inputs)
        greedy = greedy_reward(source, heldout, inputs=inputs, samples=samples)
        refit = sampler.report()
    accuracy, measured = name_score(greedy, inputs=inputs)
    extra = {**refit, **scorer.score_start(generated), **mean_parts(rewards), **measured}
    return {"reward_mean": sum(rewards) / len(rewards), "accuracy": accuracy, "extra": extra}
