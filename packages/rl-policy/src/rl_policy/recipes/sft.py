"""Supervised fine-tuning on problems and their answers, alone or as the warm-up of GRPO."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import perf_counter

from rl_policy.data.problems import ProblemStream
from rl_policy.losses import NLLLoss
from rl_policy.policy import Policy
from rl_policy.run.checkpoints import RunState
from rl_policy.run.evaluation import greedy_accuracy, pass_rate
from rl_policy.run.loop import run_loop
from rl_policy.run.metrics import SftMetrics
from rl_policy.run.session import Session, open_policy, save_final

_LOGGER = logging.getLogger(__name__)


def run_sft(session: Session, *, model: str) -> None:
    """Fine-tune a model and write it to the run's directory, or go on with doing so.

    Args:
        session: The run.
        model: Name or directory of the model to start from.
    """
    config = session.config
    checkpoint = session.checkpoints().latest()
    start = RunState() if checkpoint is None else checkpoint.state
    with open_policy(
        session, config.sft_policy(), model=model, has_reference=False, checkpoint=checkpoint
    ) as policy:
        trainer = SftTrainer(session, policy, start=start)
        run_loop(
            session,
            trainer,
            policy,
            name="SFT",
            num_steps=config.sft.steps,
            eval_every=config.sft.eval_every,
            checkpoint=checkpoint,
        )
        if config.sft.stop_pass_rate is not None and not trainer.is_done:
            _LOGGER.warning(
                "sft.steps=%d were not enough to reach sft.stop_pass_rate=%s",
                config.sft.steps,
                config.sft.stop_pass_rate,
            )
        save_final(session, policy)


class SftTrainer:
    """Takes and measures supervised steps.

    Args:
        session: The run.
        policy: What is trained.
        start: Where the run stands.
    """

    def __init__(self, session: Session, policy: Policy, *, start: RunState) -> None:
        self.is_done = start.is_done
        self._inputs = session.inputs
        self._config = session.config.sft
        self._batch_size = session.config.sft_policy()["train_global_batch_size"]
        self._policy = policy
        self._stream = ProblemStream(
            session.inputs.problems.demonstrations,
            seed=session.config.seed,
            position=start.data_position,
        )

    @property
    def data_position(self) -> int:
        """Demonstrations drawn so far."""
        return self._stream.position

    @property
    def weight_version(self) -> int:
        """No version: the training workers sample themselves."""
        return RunState().weight_version

    def measure_start(self) -> SftMetrics:
        """Return the measurements before the first step."""
        accuracy, rate = self._measure(needs_pass_rate=True)
        return SftMetrics(step=0, accuracy=accuracy, pass_rate=rate)

    def take_step(
        self, step: int, *, is_measured: bool, needs_accuracy: bool
    ) -> tuple[SftMetrics, Mapping[str, float]]:
        """Take an optimizer step, see `rl_policy.run.loop.Trainer`."""
        started = perf_counter()
        batch = self._inputs.encoder.answer_batch(self._stream.take(self._batch_size))
        result = self._policy.train(batch, NLLLoss())
        step_s = perf_counter() - started
        accuracy, rate = None, None
        if is_measured or needs_accuracy:
            accuracy, rate = self._measure(needs_pass_rate=is_measured)
        metrics = SftMetrics(
            step=step,
            accuracy=accuracy,
            pass_rate=rate,
            loss=float(result["loss"].mean()),
            grad_norm=float(result["grad_norm"].mean()),
            tokens_per_s=int(batch["input_lengths"].sum()) / step_s,
            step_s=step_s,
        )
        self.is_done = self._meets_criterion(rate)
        return metrics, {}

    def _meets_criterion(self, measured: float | None) -> bool:
        wanted = self._config.stop_pass_rate
        return measured is not None and wanted is not None and measured >= wanted

    def _measure(self, *, needs_pass_rate: bool) -> tuple[float, float | None]:
        """Return held-out accuracy and, where the criterion asks for it, the pass rate."""
        sets = self._inputs.problems
        self._policy.prepare_for_generation()
        accuracy, rate = greedy_accuracy(self._policy, sets.heldout, inputs=self._inputs), None
        if needs_pass_rate and self._config.stop_pass_rate is not None:
            num_samples = self._config.pass_samples
            rate = pass_rate(
                self._policy, sets.validation, num_samples=num_samples, inputs=self._inputs
            )
        self._policy.finish_generation()
        self._policy.prepare_for_training()
        return accuracy, rate
