"""The loop of a run: steps, measurements and checkpoints, until the last step or the goal."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from rl_policy.policy import Policy
from rl_policy.run.checkpoints import Checkpoint, RunState
from rl_policy.run.metrics import MetricsLog, StepMetrics
from rl_policy.run.progress import Phase
from rl_policy.run.session import AnySession, save_final


class Trainer(Protocol):
    """Takes and measures the steps of a recipe."""

    @property
    def is_done(self) -> bool:
        """Whether the goal is reached, and no step has to follow."""
        ...

    @property
    def data_position(self) -> int:
        """Items drawn from the training data so far; a resumed run continues there."""
        ...

    @property
    def weight_version(self) -> int:
        """The last weight version that engines had; -1 without engines."""
        ...

    def measure_start(self) -> StepMetrics:
        """Return the measurements before the first step, as step 0."""
        ...

    def take_step(self, step: int, *, is_measured: bool, needs_score: bool) -> StepMetrics:
        """Take a step, and return its metrics.

        Args:
            step: Its number, from 1.
            is_measured: Whether the configuration asks for all measurements after it.
            needs_score: Whether the score is needed, if not the others: a checkpoint follows.
        """
        ...


def run_loop(
    session: AnySession,
    trainer: Trainer,
    policy: Policy,
    *,
    name: str,
    num_steps: int,
    eval_every: int,
    start: RunState,
) -> None:
    """Take the steps that are left, record and save them, and write the final model.

    Args:
        session: The run.
        trainer: Takes the steps.
        policy: What is trained.
        name: Of the phase, for the display.
        num_steps: The last step.
        eval_every: Steps between two measurements.
        start: The state of the checkpoint that `policy` was loaded from; step 0 for a new run.
    """
    state, every = start, session.config.checkpoint.every
    with (
        session.open_log(state) as log,
        session.display.phase(name, total=num_steps, completed=state.step) as phase,
    ):
        if state.is_new:
            state = _record(trainer, state, trainer.measure_start(), log=log, phase=phase)
        while state.step < num_steps and not state.is_done:
            step = state.step + 1
            is_saved = step % every == 0 or step == num_steps
            metrics = trainer.take_step(
                step,
                is_measured=step % eval_every == 0 or step == num_steps,
                needs_score=is_saved,
            )
            state = _record(trainer, state, metrics, log=log, phase=phase)
            if is_saved or state.is_done:
                # First the log: a checkpoint whose measurements are lost could not be resumed.
                log.sync()
                save_checkpoint(session, policy, state)
    save_final(session, policy)


def save_checkpoint(session: AnySession, policy: Policy, state: RunState) -> None:
    """Save the policy and the state of the run."""

    def write(checkpoint: Checkpoint) -> None:
        policy.save_checkpoint(checkpoint.weights, checkpoint.optimizer, checkpoint.tokenizer)

    session.checkpoints().save(state, write)


def _record(
    trainer: Trainer, state: RunState, metrics: StepMetrics, *, log: MetricsLog, phase: Phase
) -> RunState:
    """Write and show the metrics, and return the state after them."""
    log.write(metrics)
    score = metrics.score()
    phase.advance(metrics.step, metrics.shown(), is_measured=score is not None)
    return replace(
        state,
        step=metrics.step,
        data_position=trainer.data_position,
        score=state.score if score is None else score,
        is_done=trainer.is_done,
        weight_version=trainer.weight_version,
    )
