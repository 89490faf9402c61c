"""Fine-tune a model on problems and their answers.

Without arguments, a tiny model is built and trained on doublings, most of which are wrong. The run
directory holds metrics.jsonl, checkpoints/, and the trained model in final/, which transformers
loads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import ClassVar

from pydantic import Field
from rl_interfaces.config.resolve import merge_sections
from rl_interfaces.config.schema import MOST

from rl_policy.backends import WORKERS_OWN
from rl_policy.config import (
    RewardSection,
    RunConfig,
    Section,
    Settings,
    merge_policy,
    resolve_policy,
)
from rl_policy.data.batches import ProblemEncoder
from rl_policy.data.items import first_items
from rl_policy.losses import NLLLoss
from rl_policy.policy import Policy
from rl_policy.recipes import Recipe
from rl_policy.run.directory import RunDirectory, RunState
from rl_policy.run.evaluation import (
    greedy_reward,
    measuring_a_step,
    name_score,
    pass_rate,
)
from rl_policy.run.inputs import (
    ProblemInputs,
    check_language_model,
    check_sampling,
    check_schedule,
    fit_answers,
    prepare_problems,
)
from rl_policy.run.metrics import StepMetrics, mean_metrics
from rl_policy.run.session import Session, open_policy, run_loop

_LOGGER = logging.getLogger(__name__)

SFT_PATH = "sft.policy"
"""Of the overrides of `policy` for supervised fine-tuning."""


class SftSection(Section):
    """Supervised fine-tuning on prompt and answer, alone or as the warm-up of GRPO."""

    steps: int = Field(default=200, ge=1, le=MOST)
    """Maximum number of optimizer steps."""
    eval_every: int = Field(default=20, ge=1, le=MOST)
    """Steps between evaluations."""
    eval_at_start: bool = True
    """Evaluate before the first step too, as step 0."""
    stop_pass_rate: float | None = Field(default=None, gt=0, le=1)
    """Stop early at this pass@`pass_samples` on the validation problems: GRPO gets no signal from a
    problem that no sample solves. It needs the reward without functions, whose mean is the share of
    solved problems. null: take all steps."""
    pass_samples: int = Field(default=8, ge=1, le=MOST)
    """Samples per validation problem."""
    policy: Settings = Field(default_factory=dict)
    """Overrides of `policy` for supervised fine-tuning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftMetrics(StepMetrics):
    """The metrics of a supervised step; None if not measured.

    Attributes:
        accuracy: Fraction of the held-out problems that greedy decoding solves after the step. With
            reward functions `extra` has the mean `reward` of the greedy completions instead.
        pass_rate: Fraction of the validation problems that at least one of several samples solves.
        loss: Negative log-likelihood per target token in nats.
        grad_norm: Norm of the gradient, before clipping.
        tokens_per_s: Tokens of prompts and answers per second of the step.
        step_s: Seconds of the step, without evaluation.
    """

    accuracy: float | None = None
    pass_rate: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    score_column: ClassVar[str | None] = "accuracy"
    headline: ClassVar[Mapping[str, str]] = {
        "loss": "loss",
        "accuracy": "accuracy",
        "pass rate": "pass_rate",
    }


def sft_policy(config: RunConfig) -> Settings:
    """Return the complete section `policy` for supervised fine-tuning.

    The training workers generate its few evaluation samples, even if GRPO uses inference engines.

    Raises:
        ValueError: An override in `sft.policy` is invalid.
    """
    own = merge_sections(
        {"generation": {"backend": WORKERS_OWN}}, config.section(SftSection).policy
    )
    merged = merge_policy(config.policy, own)
    # Only meaningful with engines: `colocated.enabled=False` contradicts sampling on the workers.
    merged.get("generation", {}).pop("colocated", None)
    return resolve_policy(merged, path=SFT_PATH)


def check_sft(config: RunConfig) -> None:
    """Raise `ValueError` if keys contradict each other."""
    check_sampling(config)
    check_language_model(sft_policy(config), path=SFT_PATH)


def prepare_sft(config: RunConfig, encoder: ProblemEncoder) -> ProblemInputs:
    """Return the problems of a run with supervised fine-tuning, checked against its limits.

    Raises:
        ValueError: A problem exceeds a limit; the message names keys and numbers.
    """
    sft = config.section(SftSection)
    reward = config.section(RewardSection)
    if sft.stop_pass_rate is not None and not reward.is_solved_share:
        raise ValueError(
            f"sft.stop_pass_rate={sft.stop_pass_rate} is a share of solved problems, and "
            f"reward.function={[str(each) for each in reward.functions]} may return any number: "
            "set sft.stop_pass_rate=null, or leave reward.function out"
        )
    key = f"sft.steps={sft.steps}"
    check_schedule(sft_policy(config), num_steps=sft.steps, key=key, path=SFT_PATH)
    num_validation = 0 if sft.stop_pass_rate is None else config.data.num_validation
    inputs = prepare_problems(config, encoder, num_validation=num_validation, imitates_answers=True)
    encoder.check_conversations(first_items(inputs.problems.demonstrations), has_answers=True)
    key = SFT_PATH if "max_total_sequence_length" in sft.policy else "policy"
    demonstrations = fit_answers(
        config,
        inputs.problems.demonstrations,
        encoder=encoder,
        limit=sft_policy(config)["max_total_sequence_length"],
        key=f"{key}.max_total_sequence_length",
    )
    if demonstrations is inputs.problems.demonstrations:
        return inputs
    return replace(inputs, problems=replace(inputs.problems, demonstrations=demonstrations))


def run_sft(session: Session[ProblemInputs], model: str) -> None:
    """Fine-tune a model, or resume; write it to the run's directory."""
    config = session.config
    sft = config.section(SftSection)
    with open_policy(session, sft_policy(config), model=model, has_reference=False) as opened:
        policy, start = opened
        trainer = SftTrainer(session, policy, start=start)
        run_loop(
            session,
            trainer,
            policy,
            name="SFT",
            num_steps=sft.steps,
            eval_every=sft.eval_every,
            eval_at_start=sft.eval_at_start,
            start=start,
        )
    if sft.stop_pass_rate is not None and not trainer.is_done:
        _LOGGER.warning(
            "sft.steps=%d were not enough to reach sft.stop_pass_rate=%s",
            sft.steps,
            sft.stop_pass_rate,
        )


def fine_tune(session: Session[ProblemInputs], path: Path, *, model: str) -> str:
    """Fine-tune a model as a part of another recipe's run, unless that is done; return its path.

    Args:
        session: The run.
        path: The directory of the part, within the run's.
        model: Name or directory of the model to start from.
    """
    directory = RunDirectory(path)
    if not directory.final.is_dir():
        directory.path.mkdir(exist_ok=True)
        # It imitates answers, which are completions.
        inputs = replace(session.inputs, episodes=None)
        run_sft(replace(session, directory=directory, inputs=inputs), model)
    return str(directory.final)


def measure_sft(session: Session[ProblemInputs], model: str) -> SftMetrics:
    """Return the held-out accuracy of the run's model."""
    section = sft_policy(session.config)
    with open_policy(
        session, section, model=model, has_reference=False, is_trained=False
    ) as opened:
        policy, start = opened
        metrics = SftTrainer(session, policy, start=start).measure_start()
    return replace(metrics, step=start.step)


class SftTrainer:
    """The training and evaluation steps of SFT, see `rl_policy.run.session.Trainer`."""

    weight_version = RunState().weight_version

    def __init__(self, session: Session[ProblemInputs], policy: Policy, *, start: RunState) -> None:
        self.is_done = start.is_done
        self._inputs = session.inputs
        self._config = session.config.section(SftSection)
        self._batch_size = sft_policy(session.config)["train_global_batch_size"]
        self._policy = policy
        self._samples = session.samples
        self._stream = session.open_stream(
            session.inputs.problems.demonstrations, position=start.data_position
        )

    @property
    def data_position(self) -> int:
        """Demonstrations consumed so far."""
        return self._stream.position

    def measure_start(self) -> SftMetrics:
        """Evaluate before the first step."""
        greedy, rate = self._measure(0, needs_pass_rate=True)
        accuracy, measured = name_score(greedy, inputs=self._inputs)
        return SftMetrics(step=0, accuracy=accuracy, pass_rate=rate, extra=measured)

    def take_step(self, step: int, *, is_measured: bool, needs_score: bool) -> SftMetrics:
        """Take one optimizer step on the next demonstrations."""
        started = perf_counter()
        batch = self._inputs.encoder.answer_batch(self._stream.take(self._batch_size))
        self._policy.prepare_for_training()
        means = mean_metrics(self._policy.train(batch, NLLLoss()))
        step_s = perf_counter() - started
        greedy, rate = None, None
        if is_measured or needs_score:
            with measuring_a_step():
                greedy, rate = self._measure(step, needs_pass_rate=is_measured)
        accuracy, measured = name_score(greedy, inputs=self._inputs)
        self.is_done = self._meets_criterion(rate)
        return SftMetrics(
            step=step,
            accuracy=accuracy,
            pass_rate=rate,
            loss=means["loss"],
            grad_norm=means["grad_norm"],
            tokens_per_s=int(batch["input_lengths"].sum()) / step_s,
            step_s=step_s,
            extra=measured,
        )

    def _meets_criterion(self, measured: float | None) -> bool:
        wanted = self._config.stop_pass_rate
        return measured is not None and wanted is not None and measured >= wanted

    def _measure(self, step: int, *, needs_pass_rate: bool) -> tuple[float, float | None]:
        """Return the held-out reward and, if the stopping criterion needs it, the pass rate."""
        sets = self._inputs.problems
        self._policy.prepare_for_generation()
        rate = None
        greedy = greedy_reward(
            self._policy, sets.heldout, inputs=self._inputs, samples=self._samples, step=step
        )
        if needs_pass_rate and self._config.stop_pass_rate is not None:
            num_samples = self._config.pass_samples
            rate = pass_rate(
                self._policy, sets.validation, num_samples=num_samples, inputs=self._inputs
            )
        self._policy.finish_generation()
        return greedy, rate


def _policies(config: RunConfig) -> dict[str, Settings]:
    has_overrides = bool(config.section(SftSection).policy)
    return {SFT_PATH if has_overrides else "policy": sft_policy(config)}


SFT = Recipe(
    name="sft",
    sections={"sft": SftSection, "reward": RewardSection},
    metrics=SftMetrics,
    prepare=prepare_sft,
    run=run_sft,
    measure=measure_sft,
    check=check_sft,
    policies=_policies,
    builtin={
        "sft": {
            "steps": 1000,
            "eval_every": 25,
            "stop_pass_rate": 0.95,
            "policy": {"optimizer": {"kwargs": {"lr": 2.0e-3}}},
        }
    },
)
