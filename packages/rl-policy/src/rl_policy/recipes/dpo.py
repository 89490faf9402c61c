"""Train a model on preferences with DPO: pairs of a chosen and a rejected completion.

Without arguments, a tiny model is built and trained to prefer correct doublings to ones without the
carry. The run directory holds metrics.jsonl, checkpoints/, and the trained
model in final/, which transformers loads.

The algorithm: direct preference optimization (Rafailov et al. 2023). The initial model of a run is
its reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pydantic import Field
from rl_interfaces.config.schema import MOST

from rl_policy.config import RunConfig, Section
from rl_policy.data.batches import Batch, ProblemEncoder
from rl_policy.data.datasets import PreferencePair
from rl_policy.losses import DPOLoss
from rl_policy.recipes import Recipe
from rl_policy.recipes.pairs import (
    PairInputs,
    PairMetrics,
    PairTrainer,
    check_pair_batches,
    prepare_pairs,
)
from rl_policy.run.directory import RunState
from rl_policy.run.inputs import check_language_model, check_schedule
from rl_policy.run.session import Session, open_policy, run_loop


class DpoSection(Section):
    """Direct preference optimization."""

    steps: int = Field(default=100, ge=1, le=MOST)
    """Optimizer steps, each on policy.train_global_batch_size / 2 pairs."""
    eval_every: int = Field(default=10, ge=1, le=MOST)
    """Steps between evaluations on the held-out pairs."""
    eval_at_start: bool = True
    """Evaluate before the first step too, as step 0."""
    beta: float = Field(default=0.1, gt=0)
    """Coefficient of the implicit KL constraint: reward per nat of log-ratio."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed fraction of pairs with a flipped label."""


def check_dpo(config: RunConfig) -> None:
    """Raise `ValueError` if the policy has no log-probabilities, or a batch would split a pair."""
    check_language_model(config.policy)
    check_pair_batches(config)


def prepare_dpo(config: RunConfig, encoder: ProblemEncoder) -> PairInputs:
    """Return the preference pairs of the run.

    Raises:
        ValueError: They cannot be read or split, or exceed the sequence length.
    """
    steps = config.section(DpoSection).steps
    check_schedule(config.policy, num_steps=steps, key=f"dpo.steps={steps}")
    return prepare_pairs(config, encoder)


def run_dpo(session: Session[PairInputs], model: str) -> None:
    """Train a model with DPO, or resume; write it to the run's directory."""
    dpo = session.config.section(DpoSection)
    with _open_trainer(session, model, is_trained=True) as (trainer, start):
        run_loop(
            session,
            trainer,
            trainer.policy,
            name="DPO",
            num_steps=dpo.steps,
            eval_every=dpo.eval_every,
            eval_at_start=dpo.eval_at_start,
            start=start,
        )


def measure_dpo(session: Session[PairInputs], model: str) -> PairMetrics:
    """Return accuracy and margin of the run's model on the held-out pairs."""
    with _open_trainer(session, model, is_trained=False) as (trainer, start):
        return replace(trainer.measure_start(), step=start.step)


@contextmanager
def _open_trainer(
    session: Session[PairInputs], model: str, *, is_trained: bool
) -> Iterator[tuple[DpoTrainer, RunState]]:
    dpo = session.config.section(DpoSection)
    loss = DPOLoss(beta=dpo.beta, label_smoothing=dpo.label_smoothing)
    with open_policy(
        session, session.config.policy, model=model, has_reference=True, is_trained=is_trained
    ) as (policy, start):
        yield DpoTrainer(session, policy, loss, start=start), start


class DpoTrainer(PairTrainer):
    """The training and evaluation steps of DPO."""

    def batch(self, pairs: Sequence[PreferencePair]) -> Batch:
        """Return two adjacent rows per pair, chosen first, with reference log-probabilities."""
        batch = super().batch(pairs)
        self.policy.prepare_for_lp_inference()
        reference = self.policy.get_reference_policy_logprobs(batch, temperature=1.0)
        batch["reference_logprobs"] = reference["reference_logprobs"]
        return batch


DPO = Recipe(
    name="dpo",
    sections={"dpo": DpoSection},
    metrics=PairMetrics,
    prepare=prepare_dpo,
    run=run_dpo,
    measure=measure_dpo,
    check=check_dpo,
    builtin={"dpo": {"steps": 60}},
)
