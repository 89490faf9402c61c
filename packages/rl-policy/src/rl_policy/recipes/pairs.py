"""What recipes on preference pairs share: data, metrics, and the steps of training.

A batch has two rows per pair, chosen first, which `rows_per_group` of their losses keeps together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

from rl_interfaces import LossFunction

from rl_policy.config import RunConfig
from rl_policy.data.batches import Batch, ProblemEncoder
from rl_policy.data.datasets import (
    PairSets,
    PreferencePair,
    arithmetic_pairs,
    divide_pairs,
    read_pairs,
)
from rl_policy.data.items import first_items
from rl_policy.losses import ROWS_PER_PAIR
from rl_policy.policy import Policy
from rl_policy.run.directory import RunState
from rl_policy.run.inputs import RunInputs, check_shares, fit_answers, read_own_data
from rl_policy.run.metrics import StepMetrics, mean_metrics
from rl_policy.run.session import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class PairMetrics(StepMetrics):
    """The metrics of a step on pairs; None if not measured.

    Attributes:
        accuracy: Fraction of the held-out pairs whose chosen completion has the higher reward.
        heldout_margin: Mean reward margin, chosen minus rejected, over the held-out pairs.
        reward_margin: Mean reward margin over the pairs of the step, before its update.
        chosen_reward: Mean reward of the chosen completions of the step.
        rejected_reward: Mean reward of the rejected completions of the step.
        loss: Per pair; in nats, but for further terms.
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

    def digests(self) -> Mapping[str, str]:
        """Return those of the pairs."""
        return self.pairs.digests()


def check_pair_batches(config: RunConfig) -> None:
    """Raise `ValueError` if a batch would split a pair."""
    for key in ("train_global_batch_size", "train_micro_batch_size"):
        if config.policy[key] % ROWS_PER_PAIR:
            raise ValueError(
                f"policy.{key}={config.policy[key]} is not even: a preference pair is two rows"
            )


def prepare_pairs(config: RunConfig, encoder: ProblemEncoder) -> PairInputs:
    """Return the preference pairs of the run.

    Raises:
        ValueError: They cannot be read or split, or exceed the sequence length.
    """
    given, heldout = read_own_data(config, encoder, read_pairs)
    pairs = divide_pairs(
        arithmetic_pairs(max_number=config.data.max_number) if given is None else given,
        heldout=heldout,
        num_heldout=config.data.num_heldout,
        seed=config.seed,
    )
    rendered = [row for pair in first_items(pairs.train, pairs.heldout) for row in pair.rows]
    encoder.check_conversations(rendered, has_answers=True)
    train, heldout = (
        fit_answers(
            config,
            rows,
            encoder=encoder,
            limit=config.policy["max_total_sequence_length"],
            key="policy.max_total_sequence_length",
        )
        for rows in (pairs.train, pairs.heldout)
    )
    check_shares(train, config.data.weights)
    pairs = PairSets(train=train, heldout=heldout)
    return PairInputs(config=config, encoder=encoder, pairs=pairs)


class PairTrainer:
    """The training and evaluation steps on pairs, see `rl_policy.run.session.Trainer`.

    Args:
        session: The run.
        policy: What is trained.
        loss: On pairs of rows.
        start: The state that the run starts from.
    """

    is_done = False
    weight_version = RunState().weight_version

    def __init__(
        self, session: Session[PairInputs], policy: Policy, loss: LossFunction, *, start: RunState
    ) -> None:
        config = session.config
        self._loss = loss
        self._num_pairs = config.policy["train_global_batch_size"] // ROWS_PER_PAIR
        self._encoder = session.inputs.encoder
        self.policy = policy
        self._stream = session.open_stream(session.inputs.pairs.train, position=start.data_position)
        # One global batch, so that means are over all held-out pairs; what a recipe adds to it is
        # computed once. Rounded up to full pairs per data-parallel rank; the missing rows are
        # masked, as in any short last step.
        self._heldout = self.batch(session.inputs.pairs.heldout)
        rows, multiple = self._heldout.size, session.cluster.world_size() * ROWS_PER_PAIR
        self._heldout_batch_size = rows + -rows % multiple

    @property
    def data_position(self) -> int:
        """Pairs consumed so far."""
        return self._stream.position

    def batch(self, pairs: Sequence[PreferencePair]) -> Batch:
        """Return two adjacent rows per pair, chosen first."""
        return self._encoder.answer_batch([row for pair in pairs for row in pair.rows])

    def measure_start(self) -> PairMetrics:
        """Evaluate before the first step."""
        accuracy, margin = self._measure()
        return PairMetrics(step=0, accuracy=accuracy, heldout_margin=margin)

    def take_step(self, step: int, *, is_measured: bool, needs_score: bool) -> PairMetrics:
        """Take one optimizer step on the next pairs."""
        started = perf_counter()
        batch = self.batch(self._stream.take(self._num_pairs))
        self.policy.prepare_for_training()
        result = self.policy.train(batch, self._loss)
        step_s = perf_counter() - started
        means = mean_metrics(result)
        accuracy, margin = self._measure() if is_measured or needs_score else (None, None)
        return PairMetrics(
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

    def _measure(self) -> tuple[float, float]:
        """Return accuracy and mean reward margin of the held-out pairs."""
        self.policy.prepare_for_lp_inference()
        result = self.policy.train(
            self._heldout, self._loss, eval_mode=True, gbs=self._heldout_batch_size
        )
        means = mean_metrics(result)
        return means["pair_accuracy"], means["reward_margin"]
