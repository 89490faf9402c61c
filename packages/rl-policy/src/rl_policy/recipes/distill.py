"""Distil a teacher into a model: it learns the teacher's distributions on completions of its own.

Without arguments, a tiny model is built and fine-tuned on doublings to be the teacher, and another
one learns from it. The run directory holds metrics.jsonl, samples.jsonl, checkpoints/, and the
trained model in final/, which transformers loads.

The algorithm: on-policy distillation (Agarwal et al. 2024), on the teacher's most likely tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from rl_interfaces.config.resolve import merge_sections
from rl_interfaces.config.schema import MOST
from rl_refit.report import Stopwatch

from rl_policy.config import (
    BUILTIN_MODEL,
    RefitSection,
    RewardSection,
    RunConfig,
    Section,
    Settings,
    merge_policy,
    naming_section,
    resolve_policy,
)
from rl_policy.data.batches import Batch, ProblemEncoder, completion_batch
from rl_policy.losses import DistillationLoss
from rl_policy.policy import Policy
from rl_policy.recipes import Recipe
from rl_policy.recipes.policy_gradient.config import (
    check_adapters_alone,
    check_delta,
    check_refit,
    check_slices,
)
from rl_policy.recipes.sft import (
    SFT,
    SFT_PATH,
    SftSection,
    fine_tune,
    prepare_sft,
    sft_policy,
)
from rl_policy.run.directory import RunState
from rl_policy.run.evaluation import heldout_reward, measuring_a_step, name_score, sample
from rl_policy.run.inputs import (
    ProblemInputs,
    check_language_model,
    check_sampling,
    check_schedule,
    check_vocabulary,
    is_missing_directory,
    prepare_problems,
    warn_of_repeated,
)
from rl_policy.run.machine import check_model_files
from rl_policy.run.metrics import StepMetrics, mean_metrics
from rl_policy.run.samplers import Sampler, counting_move, open_sampler, weight_version
from rl_policy.run.session import Session, open_policy, run_loop

_PATH = "distill.teacher_policy"
_MODEL = "distill.teacher"


class DistillSection(Section):
    """Distillation of a teacher."""

    teacher: str | None = Field(default=None, min_length=1)
    """Name or directory of the teacher, which has the vocabulary of the model. null: beside a model
    that is built here, another one that is fine-tuned first as `sft` says."""
    teacher_policy: Settings = Field(default_factory=dict)
    """Overrides of `policy` for the teacher."""
    steps: int = Field(default=200, ge=1, le=MOST)
    """Optimizer steps, each on policy.train_global_batch_size completions."""
    eval_every: int = Field(default=20, ge=1, le=MOST)
    """Steps between evaluations."""
    eval_at_start: bool = True
    """Evaluate before the first step too, as step 0."""
    top_k: int = Field(default=64, ge=1, le=MOST)
    """The teacher's most likely tokens that are compared; all others have the probability 0."""
    beta: float = Field(default=0.5, ge=0, le=1)
    """Of the generalized Jensen-Shannon divergence: 0 is the forward divergence from the teacher,
    which covers all that it does, 1 the reverse one, which keeps to what it does most."""
    truncate_student: bool = False
    """Renormalise the model's distribution over these tokens too; beta=1 needs it. What the model
    gives to others is then free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillMetrics(StepMetrics):
    """The metrics of a distillation step; None if not measured.

    With engines, `extra` has the report of the refit whose weights generated the completions.

    Attributes:
        accuracy: Fraction of the held-out problems that greedy decoding solves after the step.
        loss: The divergence in nats per token of the completions.
        grad_norm: Norm of the gradient, before clipping.
        teacher_agreement: Share of the tokens at which model and teacher have the same most likely
            token.
        teacher_coverage: The model's probability of the teacher's `top_k` tokens, a mean over
            tokens.
        completion_length_mean: Mean number of tokens of the completions.
        truncated_share: Share of the completions that `max_new_tokens` has ended.
        tokens_per_s: Tokens of prompts and completions per second of the step.
        step_s: Seconds of the step, without evaluation.
        move_s: Seconds of moving state on and off the devices, without the refit.
        generate_s: Seconds of sampling.
        teacher_s: Seconds of the teacher's logits.
        train_s: Seconds of the optimizer step.
        refit_s: Seconds of sending weights to inference engines; 0.0 without engines.
    """

    accuracy: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    teacher_agreement: float | None = None
    teacher_coverage: float | None = None
    completion_length_mean: float | None = None
    truncated_share: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    move_s: float | None = None
    generate_s: float | None = None
    teacher_s: float | None = None
    train_s: float | None = None
    refit_s: float = 0.0
    score_column: ClassVar[str | None] = "accuracy"
    headline: ClassVar[Mapping[str, str]] = {"loss": "loss", "accuracy": "accuracy"}


def teacher_policy(config: RunConfig) -> Settings:
    """Return the complete section `policy` of the teacher, which is not trained.

    Raises:
        ValueError: An override in `distill.teacher_policy` is invalid.
    """
    section = config.section(DistillSection)
    teacher = section.teacher or BUILTIN_MODEL
    # It has its own tokenizer, and adapters are of what is trained.
    own = {"model_name": teacher, "tokenizer": {"name": teacher}}
    merged = merge_policy(config.policy, merge_sections(own, section.teacher_policy))
    for backend, key in (("dtensor_cfg", "lora"), ("megatron_cfg", "peft")):
        if key in merged.get(backend, {}):
            merged[backend][key]["enabled"] = False
    return resolve_policy(merged, path=_PATH)


def check_distill(config: RunConfig) -> None:
    """Raise `ValueError` if keys contradict each other."""
    section, refit = config.section(DistillSection), config.section(RefitSection)
    check_sampling(config)
    check_language_model(teacher_policy(config), path=_PATH)
    if section.teacher is None and not config.has_builtin_model:
        raise ValueError(
            f"distill.teacher is not set, and policy.model_name={config.policy['model_name']!r} "
            "has none: give name or directory of the model to learn from"
        )
    if is_missing_directory(section.teacher or ""):
        raise ValueError(f"distill.teacher={section.teacher!r} is no directory")
    check_refit(refit, config.policy["generation"])
    check_delta(config)
    check_adapters_alone(config)
    check_slices(config)
    if refit.verify == "logprobs":
        raise ValueError(
            "refit.verify='logprobs' compares log-probabilities that a distillation does not "
            "compute: use 'digest'"
        )


def prepare_distill(config: RunConfig, encoder: ProblemEncoder) -> ProblemInputs:
    """Return the problems of the run, with a teacher that has the same vocabulary.

    Raises:
        ValueError: A problem exceeds a limit, or the teacher cannot be read or does not fit; the
            message names keys and numbers.
    """
    section = config.section(DistillSection)
    check_schedule(config.policy, num_steps=section.steps, key=f"distill.steps={section.steps}")
    teacher = teacher_policy(config)
    size = len(encoder.tokenizer)
    if section.teacher is not None:
        with naming_section(_PATH, model_key=_MODEL):
            check_model_files(teacher, key=_MODEL)
            size = check_vocabulary(teacher, encoder, key=_MODEL)
    if section.top_k > size:
        raise ValueError(
            f"distill.top_k={section.top_k} is more than the {size} tokens of the vocabulary"
        )
    if section.beta == 1 and not section.truncate_student and section.top_k < size:
        raise ValueError(
            f"distill.beta=1 is infinite with distill.top_k={section.top_k} of {size} tokens, as "
            "the teacher's probability of the others is 0: set distill.truncate_student=true, or "
            "a distill.beta below 1"
        )
    if section.teacher is None:
        inputs = prepare_sft(config, encoder)
    else:
        inputs = prepare_problems(config, encoder)
    warn_of_repeated(inputs.problems.train)
    return inputs


def run_distill(session: Session[ProblemInputs], model: str) -> None:
    """Train a model on a teacher's distributions, or resume; write it to the run's directory."""
    section = session.config.section(DistillSection)
    teacher = section.teacher or fine_tune(session, session.directory.teacher, model=model)
    with (
        _open_teacher(session, teacher) as source,
        open_policy(session, session.config.policy, model=model, has_reference=False) as opened,
    ):
        policy, start = opened
        with open_sampler(session, policy, model=model, start=start) as sampler:
            run_loop(
                session,
                DistillTrainer(session, policy, sampler, source, start=start),
                policy,
                name="Distillation",
                num_steps=section.steps,
                eval_every=section.eval_every,
                eval_at_start=section.eval_at_start,
                start=start,
            )


def measure_distill(session: Session[ProblemInputs], model: str) -> DistillMetrics:
    """Return the greedy accuracy of the run's model on the held-out problems."""
    with (
        open_policy(
            session, session.config.policy, model=model, has_reference=False, is_trained=False
        ) as (policy, start),
        open_sampler(session, policy, model=model, start=start) as sampler,
    ):
        trainer = DistillTrainer(session, policy, sampler, None, start=start)
        return replace(trainer.measure_start(), step=start.step)


@contextmanager
def _open_teacher(session: Session[ProblemInputs], model: str) -> Iterator[Policy]:
    """Yield the teacher, off the devices; end its processes afterwards."""
    config: Any = {**teacher_policy(session.config), "model_name": model}
    with naming_section(_PATH, model_key=_MODEL):
        teacher = Policy(
            session.cluster,
            config,
            session.inputs.tokenizer,
            init_optimizer=False,
            init_reference_model=False,
        )
    try:
        teacher.offload_after_refit()
        yield teacher
    finally:
        teacher.shutdown()


class DistillTrainer:
    """The training and evaluation steps of a distillation, see `rl_policy.run.session.Trainer`.

    Args:
        session: The run.
        policy: What is trained.
        sampler: What samples.
        teacher: What is learned from. None: nothing is trained.
        start: The state that the run starts from.
    """

    is_done = False

    def __init__(
        self,
        session: Session[ProblemInputs],
        policy: Policy,
        sampler: Sampler,
        teacher: Policy | None,
        *,
        start: RunState,
    ) -> None:
        self._inputs = session.inputs
        self._config = session.config.section(DistillSection)
        self._batch_size = int(session.config.policy["train_global_batch_size"])
        self._max_new_tokens = int(session.config.policy["generation"]["max_new_tokens"])
        self._loss = DistillationLoss(
            beta=self._config.beta, truncates_student=self._config.truncate_student
        )
        self._policy = policy
        self._sampler = sampler
        self._teacher = teacher
        self._samples = session.samples
        self._stream = session.open_stream(
            session.inputs.problems.train, position=start.data_position
        )

    @property
    def data_position(self) -> int:
        """Problems consumed so far."""
        return self._stream.position

    @property
    def weight_version(self) -> int:
        """The last weight version that engines had; -1 without engines."""
        return weight_version(self._sampler)

    def measure_start(self) -> DistillMetrics:
        """Evaluate before the first step."""
        greedy = self._heldout_reward(0)
        accuracy, measured = name_score(greedy, inputs=self._inputs)
        return DistillMetrics(step=0, accuracy=accuracy, extra=self._sampler.report() | measured)

    def take_step(self, step: int, *, is_measured: bool, needs_score: bool) -> DistillMetrics:
        """Sample completions, let the teacher score them, and train."""
        watch = Stopwatch()
        with watch.phase("step_s"):
            generated = self._sample(step, watch)
            report = self._sampler.report()
            batch = completion_batch(generated)
            self._add_teacher(batch, watch)
            means = self._train(batch, watch)
        lengths = generated["generation_lengths"].double()
        greedy = None
        if is_measured or needs_score:
            with measuring_a_step():
                greedy = self._heldout_reward(step)
        accuracy, measured = name_score(greedy, inputs=self._inputs)
        return DistillMetrics(
            step=step,
            accuracy=accuracy,
            loss=means["loss"],
            grad_norm=means["grad_norm"],
            teacher_agreement=means["teacher_agreement"],
            teacher_coverage=means["teacher_coverage"],
            completion_length_mean=float(lengths.mean()),
            truncated_share=self._inputs.encoder.truncated_share(
                generated, max_new_tokens=self._max_new_tokens
            ),
            tokens_per_s=int(batch["input_lengths"].sum()) / watch.of("step_s"),
            extra=report | measured,
            step_s=watch.of("step_s"),
            move_s=watch.of("move_s"),
            generate_s=watch.of("generate_s"),
            teacher_s=watch.of("teacher_s"),
            train_s=watch.of("train_s"),
        )

    def _sample(self, step: int, watch: Stopwatch) -> Mapping[str, torch.Tensor]:
        """Return a completion of each of the next problems."""
        moved = self._sampler.after_step(step - 1)
        with counting_move(self._sampler, moved, watch) as source:
            problems = self._stream.take(self._batch_size)
            return sample(source, problems, inputs=self._inputs, watch=watch)

    def _add_teacher(self, batch: Batch, watch: Stopwatch) -> None:
        """Add the teacher's largest logits at each position of the completions."""
        assert self._teacher is not None
        with watch.phase("move_s"):
            self._policy.offload_after_refit()
            self._teacher.prepare_for_lp_inference()
        with naming_section(_PATH), watch.phase("teacher_s"):
            batch.update(self._teacher.get_topk_logits(batch, self._config.top_k))
        with watch.phase("move_s"):
            self._teacher.offload_after_refit()

    def _train(self, batch: Batch, watch: Stopwatch) -> dict[str, float]:
        with watch.phase("move_s"):
            self._policy.prepare_for_training()
        with watch.phase("train_s"):
            means = mean_metrics(self._policy.train(batch, self._loss))
        with watch.phase("move_s"):
            self._policy.finish_training()
        return means

    def _heldout_reward(self, step: int) -> float:
        moved = self._sampler.after_step(step)
        return heldout_reward(moved, inputs=self._inputs, samples=self._samples, step=step)


def _policies(config: RunConfig) -> dict[str, Settings]:
    has_own_teacher = config.section(DistillSection).teacher is None
    first = {SFT_PATH: sft_policy(config)} if has_own_teacher else {}
    return {"policy": config.policy, _PATH: teacher_policy(config), **first}


DISTILL = Recipe(
    name="distill",
    sections={
        "distill": DistillSection,
        "reward": RewardSection,
        "sft": SftSection,
        "refit": RefitSection,
    },
    metrics=DistillMetrics,
    prepare=prepare_distill,
    run=run_distill,
    measure=measure_distill,
    check=check_distill,
    policies=_policies,
    builtin={
        **SFT.builtin,
        # Another model's mistakes are not to be learned.
        "data": {"careless_share": 0.0},
        "sft": {**SFT.builtin["sft"], "steps": 150, "eval_every": 50, "stop_pass_rate": None},
        "distill": {"steps": 100, "top_k": 8},
        "policy": {"optimizer": {"kwargs": {"lr": 2.0e-3}}},
    },
    num_policies=2,
    samples_with_engines=True,
)
