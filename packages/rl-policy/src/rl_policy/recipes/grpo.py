"""Group relative policy optimization (Shao et al. 2024) on problems with verifiable answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces import LossType

from rl_policy.config import LossSection
from rl_policy.losses import ClippedPGLoss
from rl_policy.policy import Policy
from rl_policy.recipes.advantages import group_relative_advantages
from rl_policy.recipes.batches import completion_batch
from rl_policy.recipes.checkpoints import RunState
from rl_policy.recipes.evaluation import greedy_accuracy, sampled_reward
from rl_policy.recipes.loop import run_loop
from rl_policy.recipes.metrics import GrpoMetrics, read_metrics, sum_micro_batches
from rl_policy.recipes.plots import plot_reward
from rl_policy.recipes.problems import ProblemStream
from rl_policy.recipes.run_directory import RunDirectory
from rl_policy.recipes.session import Session, open_policy, save_final
from rl_policy.recipes.sft import run_sft

_DIAGNOSTICS = ("clip_fraction", "policy_loss", "probs_ratio", "sampler_trainer_ratio")


def run_grpo(session: Session, *, model: str) -> None:
    """Train a model with GRPO and write it to the run's directory, or go on with doing so.

    Args:
        session: The run.
        model: Name or directory of the model to start from.
    """
    config = session.config
    if config.has_warm_up:
        model = warm_up(session, model=model)
    checkpoint = session.checkpoints().latest()
    start = RunState() if checkpoint is None else checkpoint.state
    with open_policy(
        session,
        config.policy,
        model=model,
        has_reference=config.loss.kl_coef > 0,
        checkpoint=checkpoint,
    ) as policy:
        run_loop(
            session,
            GrpoTrainer(session, policy, start=start),
            policy,
            name="GRPO",
            num_steps=config.grpo.steps,
            eval_every=config.grpo.eval_every,
            checkpoint=checkpoint,
        )
        save_final(session, policy)
    plot_reward(read_metrics(session.directory.metrics), session.directory.plot)


def warm_up(session: Session, *, model: str) -> str:
    """Fine-tune the model in a directory of its own, unless that was done, and return where it is.

    Args:
        session: The run.
        model: Name or directory of the model to start from.
    """
    directory = RunDirectory(session.directory.warm_up)
    if not directory.final.is_dir():
        directory.path.mkdir(exist_ok=True)
        run_sft(replace(session, directory=directory), model=model)
    return str(directory.final)


def build_loss(section: LossSection) -> ClippedPGLoss:
    """Return the loss that the section `loss` describes."""
    arguments = section.model_dump()
    return ClippedPGLoss(**{**arguments, "loss_type": LossType(section.loss_type)})


class GrpoTrainer:
    """Takes and measures GRPO steps.

    Args:
        session: The run.
        policy: What is trained.
        start: Where the run stands.
    """

    def __init__(self, session: Session, policy: Policy, *, start: RunState) -> None:
        self.is_done = False
        self._inputs = session.inputs
        self._config = session.config.grpo
        self._has_reference = session.config.loss.kl_coef > 0
        self._loss = build_loss(session.config.loss)
        self._policy = policy
        self._stream = ProblemStream(
            session.inputs.problems.train,
            seed=session.config.seed,
            position=start.data_position,
        )

    @property
    def data_position(self) -> int:
        """Problems drawn so far."""
        return self._stream.position

    def measure_start(self) -> GrpoMetrics:
        """Return the measurements before the first update, both on held-out problems."""
        heldout = self._inputs.problems.heldout
        reward_mean = sampled_reward(self._policy, heldout, inputs=self._inputs)
        return GrpoMetrics(step=0, reward_mean=reward_mean, accuracy=self._accuracy())

    def take_step(
        self, step: int, *, is_measured: bool, needs_accuracy: bool
    ) -> tuple[GrpoMetrics, Mapping[str, float]]:
        """Sample, reward, score and train, see `rl_policy.recipes.loop.Trainer`."""
        watch = Stopwatch()
        with watch.measure("step_s"):
            with watch.measure("generate_s"):
                batch, reward_mean = self._sample()
            with watch.measure("logprob_s"):
                self._score(batch)
            with watch.measure("train_s"):
                trained = self._train(batch)
        metrics = GrpoMetrics(
            step=step,
            reward_mean=reward_mean,
            accuracy=self._accuracy() if is_measured or needs_accuracy else None,
            loss=trained["loss"],
            grad_norm=trained["grad_norm"],
            kl=trained.get("kl"),
            entropy=trained["entropy"],
            tokens_per_s=int(batch["input_lengths"].sum()) / watch.seconds["step_s"],
            **watch.seconds,
        )
        return metrics, {name: trained[name] for name in _DIAGNOSTICS if name in trained}

    def _sample(self) -> tuple[BatchedDataDict[Any], float]:
        """Return a batch of completions with their advantages, and the mean reward."""
        group_size = self._config.samples_per_prompt
        problems = self._stream.take(self._config.prompts_per_step)
        prompts = self._inputs.encoder.prompt_batch(problems).repeat_interleave(group_size)
        self._policy.prepare_for_generation()
        generated = self._policy.generate(prompts)
        self._policy.finish_generation()
        texts = self._inputs.encoder.completion_texts(generated)
        repeated = [problem for problem in problems for _ in range(group_size)]
        rewards = torch.tensor(self._inputs.reward(texts, repeated))
        advantages = group_relative_advantages(
            rewards,
            group_size=group_size,
            leave_one_out=self._config.leave_one_out,
            divide_by_std=self._config.divide_by_std,
        )
        return completion_batch(generated, advantages=advantages), float(rewards.mean())

    def _score(self, batch: BatchedDataDict[Any]) -> None:
        """Add old and reference log-probabilities to the batch, where the loss reads them."""
        if self._config.old_logprobs == "sampler":
            batch["prev_logprobs"] = batch["generation_logprobs"]
        if self._config.old_logprobs == "trainer" or self._has_reference:
            self._policy.prepare_for_lp_inference()
        if self._config.old_logprobs == "trainer":
            batch["prev_logprobs"] = self._policy.get_logprobs(batch)["logprobs"]
        if self._has_reference:
            reference = self._policy.get_reference_policy_logprobs(batch)
            batch["reference_logprobs"] = reference["reference_logprobs"]

    def _train(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Pass over the batch, and return the means of what was measured."""
        self._policy.prepare_for_training()
        results = [
            self._policy.train(batch, self._loss) for _ in range(self._config.epochs_per_step)
        ]
        self._policy.finish_training()
        passes = [
            {
                **sum_micro_batches(result["all_mb_metrics"], num_steps=len(result["loss"])),
                "loss": float(result["loss"].mean()),
                "grad_norm": float(result["grad_norm"].mean()),
            }
            for result in results
        ]
        return {name: sum(each[name] for each in passes) / len(passes) for name in passes[0]}

    def _accuracy(self) -> float:
        return greedy_accuracy(self._policy, self._inputs.problems.heldout, inputs=self._inputs)


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record how long the block takes."""
        started = perf_counter()
        yield
        self.seconds[name] = perf_counter() - started
