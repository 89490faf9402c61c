"""Train a model on preferences with DPO: pairs of a chosen and a rejected completion.

Without arguments, a tiny model is built and trained to prefer correct doublings to ones without the
carry. The run directory holds metrics.jsonl, checkpoints/, and the trained
model in final/, which transformers loads.

The algorithm: direct preference optimization (Rafailov et al. 2023). The initial model of a run is
its reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

from pydantic import Field
from rl_interfaces.config.schema import MOST

from rl_policy.config import RunConfig, Section
from rl_policy.data.batches import Batch, ProblemEncoder
from rl_policy.data.datasets import (
    PairSets,
    PreferencePair,
    ShuffledStream,
    arithmetic_pairs,
    divide_pairs,
    read_pairs,
)
from rl_policy.losses import DPOLoss
from rl_policy.policy import Policy
from rl_policy.recipes import Recipe
from rl_policy.run.directory import RunState
from rl_policy.run.inputs import (
    RunInputs,
    check_language_model,
    check_rows,
    check_schedule,
    read_own_data,
)
from rl_policy.run.metrics import StepMetrics, mean_metrics
from rl_policy.run.session import Session, open_policy, run_loop


class DpoSection(Section):
    """Direct preference optimization."""

    steps: int = Field(default=100, ge=1, le=MOST)
    """Optimizer steps, each on policy.train_global_batch_size / 2 pairs."""
    eval_every: int = Field(default=10, ge=1, le=MOST)
    """Steps between evaluations on the held-out pairs."""
    beta: float = Field(default=0.1, gt=0)
    """Coefficient of the implicit KL constraint: reward per nat of log-ratio."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed fraction of pairs with a flipped label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoMetrics(StepMetrics):
    """The metrics of a DPO step; None if not measured.

    Attributes:
        accuracy: Fraction of the held-out pairs whose chosen completion has the higher reward.
        heldout_margin: Mean reward margin, chosen minus rejected, over the held-out pairs.
        reward_margin: Mean reward margin over the pairs of the step, before its update.
        chosen_reward: Mean implicit reward of the chosen completions of the step.
        rejected_reward: Mean implicit reward of the rejected completions of the step.
        loss: In nats per pair.
        grad_norm: Norm of the gradient, before clipping.
        tokens_per_s: Tokens of both completions and their prompts, per second of the step.
        step_s: Seconds of the step, without evaluation.
    """

    accuracy: float | None = None
    heldout_margin: float | None = None
    reward_margin: float | None = None
    chosen_reward: float | None = None
    rejected_reward: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    score_column: ClassVar[str | None] = "accuracy"
    headline: ClassVar[Mapping[str, str]] = {
        "loss": "loss",
        "margin": "heldout_margin",
        "accuracy": "accuracy",
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class PairInputs(RunInputs):
    """The inputs of a run on preference pairs."""

    pairs: PairSets


def check_dpo(config: RunConfig) -> None:
    """Raise `ValueError` if the policy has no log-probabilities, or a batch would split a pair."""
    check_language_model(config.policy)
    for key in ("train_global_batch_size", "train_micro_batch_size"):
        if config.policy[key] % DPOLoss.rows_per_group:
            raise ValueError(
                f"policy.{key}={config.policy[key]} is not even: a preference pair is two rows"
            )


def prepare_dpo(config: RunConfig, encoder: ProblemEncoder) -> PairInputs:
    """Return the preference pairs of the run.

    Raises:
        ValueError: They cannot be read or split, or exceed the sequence length.
    """
    steps = config.section(DpoSection).steps
    check_schedule(config.policy, num_steps=steps, key=f"dpo.steps={steps}")
    given, heldout = read_own_data(config.data, read_pairs)
    pairs = divide_pairs(
        arithmetic_pairs(max_number=config.data.max_number) if given is None else given,
        heldout=heldout,
        num_heldout=config.data.num_heldout,
        seed=config.seed,
    )
    check_rows(
        [row for pair in (*pairs.train, *pairs.heldout) for row in pair.rows],
        encoder=encoder,
        limit=config.policy["max_total_sequence_length"],
        key="policy.max_total_sequence_length",
    )
    return PairInputs(config=config, encoder=encoder, pairs=pairs)


def run_dpo(session: Session[PairInputs], model: str) -> None:
    """Train a model with DPO, or resume; write it to the run's directory."""
    config = session.config
    dpo = config.section(DpoSection)
    with open_policy(session, config.policy, model=model, has_reference=True) as (policy, start):
        run_loop(
            session,
            DpoTrainer(session, policy, start=start),
            policy,
            name="DPO",
            num_steps=dpo.steps,
            eval_every=dpo.eval_every,
            start=start,
        )


class DpoTrainer:
    """The training and evaluation steps of DPO, see `rl_policy.run.session.Trainer`."""

    is_done = False
    weight_version = RunState().weight_version

    def __init__(self, session: Session[PairInputs], policy: Policy, *, start: RunState) -> None:
        config = session.config
        dpo = config.section(DpoSection)
        self._loss = DPOLoss(beta=dpo.beta, label_smoothing=dpo.label_smoothing)
        self._num_pairs = config.policy["train_global_batch_size"] // DPOLoss.rows_per_group
        self._encoder = session.inputs.encoder
        self._policy = policy
        self._stream = ShuffledStream(
            session.inputs.pairs.train, seed=config.seed, position=start.data_position
        )
        # The reference is frozen: its log-probabilities of the held-out pairs are computed once.
        self._heldout = self._batch(session.inputs.pairs.heldout)
        # One global batch, so that means are over all held-out pairs. Rounded up to full pairs per
        # data-parallel rank; the missing rows are masked, as in any short last step.
        rows, multiple = self._heldout.size, session.cluster.world_size() * DPOLoss.rows_per_group
        self._heldout_batch_size = rows + -rows % multiple

    @property
    def data_position(self) -> int:
        """Pairs consumed so far."""
        return self._stream.position

    def measure_start(self) -> DpoMetrics:
        """Evaluate before the first step, where policy and reference are equal."""
        accuracy, margin = self._measure()
        return DpoMetrics(step=0, accuracy=accuracy, heldout_margin=margin)

    def take_step(self, step: int, *, is_measured: bool, needs_score: bool) -> DpoMetrics:
        """Take one optimizer step on the next pairs."""
        started = perf_counter()
        batch = self._batch(self._stream.take(self._num_pairs))
        self._policy.prepare_for_training()
        result = self._policy.train(batch, self._loss)
        step_s = perf_counter() - started
        means = mean_metrics(result)
        accuracy, margin = self._measure() if is_measured or needs_score else (None, None)
        return DpoMetrics(
            step=step,
            accuracy=accuracy,
            heldout_margin=margin,
            reward_margin=means["reward_margin"],
            chosen_reward=means["chosen_reward"],
            rejected_reward=means["rejected_reward"],
            loss=means["loss"],
            grad_norm=means["grad_norm"],
            tokens_per_s=int(batch["input_lengths"].sum()) / step_s,
            step_s=step_s,
        )

    def _batch(self, pairs: Sequence[PreferencePair]) -> Batch:
        """Return two adjacent rows per pair, chosen first, with reference log-probabilities."""
        batch = self._encoder.answer_batch([row for pair in pairs for row in pair.rows])
        self._policy.prepare_for_lp_inference()
        reference = self._policy.get_reference_policy_logprobs(batch)
        batch["reference_logprobs"] = reference["reference_logprobs"]
        return batch

    def _measure(self) -> tuple[float, float]:
        """Return accuracy and mean reward margin of the held-out pairs."""
        self._policy.prepare_for_lp_inference()
        result = self._policy.train(
            self._heldout, self._loss, eval_mode=True, gbs=self._heldout_batch_size
        )
        means = mean_metrics(result)
        return means["pair_accuracy"], means["reward_margin"]


DPO = Recipe(
    name="dpo",
    sections={"dpo": DpoSection},
    metrics=DpoMetrics,
    prepare=prepare_dpo,
    run=run_dpo,
    check=check_dpo,
    builtin={"dpo": {"steps": 60}},
)
