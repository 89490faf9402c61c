"""Group relative policy optimization (Shao et al. 2024) on problems with verifiable answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces import GenerationInterface

from rl_policy.config import LossSection
from rl_policy.data.batches import completion_batch
from rl_policy.data.problems import ProblemStream
from rl_policy.data.rewards import group_relative_advantages
from rl_policy.losses import ClippedPGLoss
from rl_policy.policy import Policy
from rl_policy.recipes.sft import run_sft
from rl_policy.run.checkpoints import RunState
from rl_policy.run.directory import RunDirectory
from rl_policy.run.evaluation import check_mismatch, complete, greedy_accuracy, sampler_mismatch
from rl_policy.run.loop import run_loop
from rl_policy.run.metrics import GrpoMetrics, read_metrics, sum_micro_batches
from rl_policy.run.plots import plot_reward
from rl_policy.run.samplers import Sampler, open_sampler
from rl_policy.run.session import Session, open_policy, save_final

_LOGGER = logging.getLogger(__name__)
_DIAGNOSTICS = ("clip_fraction", "policy_loss", "probs_ratio", "sampler_trainer_ratio")


def run_grpo(session: Session, *, model: str) -> None:
    """Train a model with GRPO and write it to the run's directory, or go on with doing so.

    Args:
        session: The run.
        model: Name or directory of the model to start from.
    """
    config = session.config
    warn_of_truncation(config.policy["generation"])
    if config.has_warm_up:
        model = warm_up(session, model=model)
    checkpoint = session.checkpoints().latest()
    start = RunState() if checkpoint is None else checkpoint.state
    opened = open_policy(
        session,
        config.policy,
        model=model,
        has_reference=config.loss.kl_coef > 0,
        checkpoint=checkpoint,
    )
    with opened as policy, open_sampler(session, policy, model=model, start=start) as sampler:
        run_loop(
            session,
            GrpoTrainer(session, policy, sampler, start=start),
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


def warn_of_truncation(generation: Mapping[str, Any]) -> None:
    """Log a warning where the sampler leaves tokens out that the trainer counts in.

    Args:
        generation: The section `policy.generation`.
    """
    untruncated = {"top_k": None, "top_p": 1.0}
    truncations = [
        f"policy.generation.{key}={generation[key]}"
        for key, whole in untruncated.items()
        if generation.get(key, whole) != whole
    ]
    if truncations:
        _LOGGER.warning(
            "%s: completions come from a truncated distribution, whose log-probabilities are not "
            "the trainer's; sampler_trainer_ratio in TensorBoard says by how much",
            " and ".join(truncations),
        )


def build_loss(section: LossSection) -> ClippedPGLoss:
    """Return the loss that the section `loss` describes."""
    return ClippedPGLoss(**section.model_dump())


class GrpoTrainer:
    """Takes and measures GRPO steps.

    Args:
        session: The run.
        policy: What is trained.
        sampler: Where completions come from.
        start: Where the run stands.
    """

    def __init__(
        self, session: Session, policy: Policy, sampler: Sampler, *, start: RunState
    ) -> None:
        self.is_done = False
        self._inputs = session.inputs
        self._config = session.config.grpo
        self._has_reference = session.config.loss.kl_coef > 0
        self._loss = build_loss(session.config.loss)
        self._policy = policy
        self._sampler = sampler
        self._has_engines = session.config.has_engines
        self._max_mismatch = session.config.refit.max_mismatch
        self._stream = ProblemStream(
            session.inputs.problems.train,
            seed=session.config.seed,
            position=start.data_position,
        )

    @property
    def data_position(self) -> int:
        """Problems drawn so far."""
        return self._stream.position

    @property
    def weight_version(self) -> int:
        """The last that engines had; -1 where there are none."""
        return int(self._sampler.report().get("weight_version", RunState().weight_version))

    def measure_start(self) -> GrpoMetrics:
        """Return the measurements before the first update, both on held-out problems."""
        heldout = self._inputs.problems.heldout
        with self._sampler.after_step(0) as source:
            rewards, generated = complete(source, heldout, inputs=self._inputs)
            accuracy = greedy_accuracy(source, heldout, inputs=self._inputs)
            refit = self._sampler.report()
        engines: dict[str, float] = {}
        if self._has_engines:
            self._policy.prepare_for_lp_inference()
            batch = completion_batch(generated, advantages=torch.zeros(len(rewards)))
            scores = self._policy.get_logprobs(batch)["logprobs"]
            engines = {**refit, **self._mismatch(batch, scores)}
        reward_mean = sum(rewards) / len(rewards)
        return GrpoMetrics(step=0, reward_mean=reward_mean, accuracy=accuracy, engines=engines)

    def take_step(
        self, step: int, *, is_measured: bool, needs_accuracy: bool
    ) -> tuple[GrpoMetrics, Mapping[str, float]]:
        """Sample, reward, score and train, see `rl_policy.run.loop.Trainer`."""
        watch = Stopwatch()
        with watch.measure("step_s"):
            with self._sampler.after_step(step - 1) as source:
                engines = self._sampler.report()
                with watch.measure("generate_s"):
                    batch, reward_mean = self._sample(source)
            with watch.measure("logprob_s"):
                engines |= self._score(batch)
            with watch.measure("train_s"):
                trained = self._train(batch)
        metrics = GrpoMetrics(
            step=step,
            reward_mean=reward_mean,
            accuracy=self._accuracy(step) if is_measured or needs_accuracy else None,
            loss=trained["loss"],
            grad_norm=trained["grad_norm"],
            kl=trained.get("kl"),
            entropy=trained["entropy"],
            tokens_per_s=int(batch["input_lengths"].sum()) / watch.seconds["step_s"],
            engines=engines,
            **watch.seconds,
        )
        return metrics, {name: trained[name] for name in _DIAGNOSTICS if name in trained}

    def _sample(self, source: GenerationInterface) -> tuple[BatchedDataDict[Any], float]:
        """Return a batch of completions with their advantages, and the mean reward."""
        group_size = self._config.samples_per_prompt
        problems = self._stream.take(self._config.prompts_per_step)
        prompts = self._inputs.encoder.prompt_batch(problems).repeat_interleave(group_size)
        generated = source.generate(prompts)
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

    def _score(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Add old and reference log-probabilities to the batch, where the loss reads them.

        Returns:
            How far the engines' log-probabilities are from the trainer's, where there are any.
        """
        own = self._config.old_logprobs == "trainer"
        mismatch: dict[str, float] = {}
        if own or self._has_engines or self._has_reference:
            self._policy.prepare_for_lp_inference()
        if own or self._has_engines:
            scores = self._policy.get_logprobs(batch)["logprobs"]
            batch["prev_logprobs"] = scores if own else batch["generation_logprobs"]
            if self._has_engines:
                mismatch = self._mismatch(batch, scores)
        else:
            batch["prev_logprobs"] = batch["generation_logprobs"]
        if self._has_reference:
            reference = self._policy.get_reference_policy_logprobs(batch)
            batch["reference_logprobs"] = reference["reference_logprobs"]
        return mismatch

    def _mismatch(
        self, batch: BatchedDataDict[Any], trainer_logprobs: torch.Tensor
    ) -> dict[str, float]:
        measured = sampler_mismatch(batch, trainer_logprobs)
        check_mismatch(measured, limit=self._max_mismatch)
        return measured

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

    def _accuracy(self, step: int) -> float:
        with self._sampler.after_step(step) as source:
            return greedy_accuracy(source, self._inputs.problems.heldout, inputs=self._inputs)


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
