"""Train a reward model on preferences: pairs of a chosen and a rejected completion.

Without arguments, a tiny model is built and trained to score correct doublings above ones without
the carry. The run directory holds metrics.jsonl, checkpoints/, and the trained
model in final/, which transformers loads for sequence classification.

The loss: Bradley and Terry 1952, as Ouyang et al. 2022 have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pydantic import Field
from rl_interfaces.config.schema import MOST

from rl_policy.config import RunConfig, Section
from rl_policy.data.batches import ProblemEncoder
from rl_policy.losses import PreferenceLoss
from rl_policy.recipes import Recipe
from rl_policy.recipes.pairs import (
    PairInputs,
    PairMetrics,
    PairTrainer,
    check_pair_batches,
    prepare_pairs,
)
from rl_policy.run.directory import RunState
from rl_policy.run.inputs import check_schedule
from rl_policy.run.session import Session, open_policy, run_loop


class RmSection(Section):
    """A reward model."""

    steps: int = Field(default=100, ge=1, le=MOST)
    """Optimizer steps, each on policy.train_global_batch_size / 2 pairs."""
    eval_every: int = Field(default=10, ge=1, le=MOST)
    """Steps between evaluations on the held-out pairs."""
    eval_at_start: bool = True
    """Evaluate before the first step too, as step 0."""
    center_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the squared sum of a pair's scores, which keeps them around zero."""


def check_rm(config: RunConfig) -> None:
    """Raise `ValueError` if the policy has no score of a row, or a batch would split a pair."""
    if config.policy["head"] != "reward":
        raise ValueError(
            f"policy.head={config.policy['head']!r} gives no score of a row: set 'reward'"
        )
    check_pair_batches(config)


def prepare_rm(config: RunConfig, encoder: ProblemEncoder) -> PairInputs:
    """Return the preference pairs of the run.

    Raises:
        ValueError: They cannot be read or split, or exceed the sequence length.
    """
    steps = config.section(RmSection).steps
    check_schedule(config.policy, num_steps=steps, key=f"rm.steps={steps}")
    return prepare_pairs(config, encoder)


def run_rm(session: Session[PairInputs], model: str) -> None:
    """Train a reward model, or resume; write it to the run's directory."""
    section = session.config.section(RmSection)
    with _open_trainer(session, model, is_trained=True) as (trainer, start):
        run_loop(
            session,
            trainer,
            trainer.policy,
            name="RM",
            num_steps=section.steps,
            eval_every=section.eval_every,
            eval_at_start=section.eval_at_start,
            start=start,
        )


def measure_rm(session: Session[PairInputs], model: str) -> PairMetrics:
    """Return accuracy and margin of the run's model on the held-out pairs."""
    with _open_trainer(session, model, is_trained=False) as (trainer, start):
        return replace(trainer.measure_start(), step=start.step)


@contextmanager
def _open_trainer(
    session: Session[PairInputs], model: str, *, is_trained: bool
) -> Iterator[tuple[PairTrainer, RunState]]:
    loss = PreferenceLoss(center_coef=session.config.section(RmSection).center_coef)
    with open_policy(
        session, session.config.policy, model=model, has_reference=False, is_trained=is_trained
    ) as (policy, start):
        yield PairTrainer(session, policy, loss, start=start), start


RM = Recipe(
    name="rm",
    sections={"rm": RmSection},
    metrics=PairMetrics,
    prepare=prepare_rm,
    run=run_rm,
    measure=measure_rm,
    check=check_rm,
    defaults={"head": "reward", "generation": None},
    builtin={"rm": {"steps": 60}, "policy": {"generation": None}},
)
