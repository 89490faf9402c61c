"""Repeat the prompts of the run's problems: a stranger's recipe, in a module and a section."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from rl_policy.config import RewardSection, Section
from rl_policy.data.datasets import ShuffledStream
from rl_policy.losses import NLLLoss
from rl_policy.recipes import Recipe
from rl_policy.run.inputs import prepare_problems
from rl_policy.run.metrics import StepMetrics
from rl_policy.run.session import open_policy, run_loop


class EchoSection(Section):
    """Repeating prompts."""

    steps: int = Field(default=2, ge=1)
    """Optimizer steps."""
    rows: int = Field(default=8, ge=1)
    """Prompts per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EchoMetrics(StepMetrics):
    nats: float | None = None
    headline: ClassVar[Mapping[str, str]] = {"nats": "nats"}


class EchoTrainer:
    is_done = False
    weight_version = -1

    def __init__(self, session, policy, start):
        self.rows = session.config.section(EchoSection).rows
        self.encoder, self.policy = session.inputs.encoder, policy
        train = session.inputs.problems.train
        self.stream = ShuffledStream(train, seed=session.config.seed, position=start.data_position)

    @property
    def data_position(self):
        return self.stream.position

    def measure_start(self):
        return EchoMetrics(step=0)

    def take_step(self, step, *, is_measured, needs_score):
        batch = self.encoder.answer_batch(self.stream.take(self.rows))
        result = self.policy.train(batch, NLLLoss(), gbs=self.rows)
        return EchoMetrics(step=step, nats=float(result["loss"].mean()))


def run_echo(session, model):
    steps = session.config.section(EchoSection).steps
    with open_policy(session, session.config.policy, model=model, has_reference=False) as opened:
        policy, start = opened
        trainer = EchoTrainer(session, policy, start)
        run_loop(session, trainer, policy, name="echo", num_steps=steps, eval_every=1, start=start)


ECHO = Recipe(
    name="echo",
    sections={"echo": EchoSection, "reward": RewardSection},
    metrics=EchoMetrics,
    prepare=prepare_problems,
    run=run_echo,
)
