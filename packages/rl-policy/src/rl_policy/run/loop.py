"""The loop of a recipe: steps, measurements, checkpoints, until the last or until it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from rl_policy.policy import Policy
from rl_policy.run.checkpoints import Checkpoint, CheckpointManager, RunState
from rl_policy.run.metrics import GrpoMetrics, MetricsLog, SftMetrics
from rl_policy.run.progress import Phase
from rl_policy.run.session import Session

Metrics = GrpoMetrics | SftMetrics


class Trainer(Protocol):
    """The steps of a recipe."""

    is_done: bool
    """Whether no step has to follow."""

    @property
    def data_position(self) -> int:
        """Problems drawn so far."""
        ...

    @property
    def weight_version(self) -> int:
        """The last that engines had; -1 where there are none."""
        ...

    def measure_start(self) -> Metrics:
        """Return the measurements before the first step."""
        ...

    def take_step(
        self, step: int, *, is_measured: bool, needs_accuracy: bool
    ) -> tuple[Metrics, Mapping[str, float]]:
        """Take a step.

        Args:
            step: Its number.
            is_measured: Whether the configuration asks for measurements after it.
            needs_accuracy: Whether accuracy is needed, if not the other measurements.

        Returns:
            The metrics, and numbers for TensorBoard alone.
        """
        ...


def run_loop(
    session: Session,
    trainer: Trainer,
    policy: Policy,
    *,
    name: str,
    num_steps: int,
    eval_every: int,
    checkpoint: Checkpoint | None,
) -> None:
    """Take the steps that are left, and record and save them.

    Args:
        session: The run.
        trainer: Takes the steps.
        policy: What is trained.
        name: Of the phase, for the display.
        num_steps: The last step.
        eval_every: Steps between two measurements.
        checkpoint: What the run goes on from; None: it starts.
    """
    manager = session.checkpoints()
    state = RunState() if checkpoint is None else checkpoint.state
    every = session.config.checkpoint.every
    with (
        session.open_log(None if checkpoint is None else state.step) as log,
        session.display.phase(name, total=num_steps, completed=state.step) as phase,
    ):
        if checkpoint is None:
            state = _record(trainer, state, trainer.measure_start(), {}, log=log, phase=phase)
        while state.step < num_steps and not state.is_done:
            step = state.step + 1
            is_saved = step % every == 0 or step == num_steps
            metrics, diagnostics = trainer.take_step(
                step,
                is_measured=step % eval_every == 0 or step == num_steps,
                needs_accuracy=is_saved,
            )
            state = _record(trainer, state, metrics, diagnostics, log=log, phase=phase)
            if is_saved or state.is_done:
                log.sync()
                save_checkpoint(manager, policy, state)


def save_checkpoint(manager: CheckpointManager, policy: Policy, state: RunState) -> None:
    """Save the policy and the state of the run."""

    def write(checkpoint: Checkpoint) -> None:
        policy.save_checkpoint(checkpoint.weights, checkpoint.optimizer, checkpoint.tokenizer)

    manager.save(state, write)


def _record(
    trainer: Trainer,
    state: RunState,
    metrics: Metrics,
    diagnostics: Mapping[str, float],
    *,
    log: MetricsLog,
    phase: Phase,
) -> RunState:
    """Write and show the metrics, and return the state after them."""
    log.write(metrics, diagnostics)
    phase.advance(metrics.step, metrics.headline())
    accuracy = state.accuracy if metrics.accuracy is None else metrics.accuracy
    return replace(
        state,
        step=metrics.step,
        data_position=trainer.data_position,
        accuracy=accuracy,
        best_accuracy=max(accuracy, state.best_accuracy),
        is_done=trainer.is_done,
        weight_version=trainer.weight_version,
    )
