"""The measurements of a run: one JSON object a step, and TensorBoard events of the same."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from rl_policy.run.directory import write_durably


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoMetrics:
    """What is measured in a GRPO step; None where it was not. Step 0 is before any update.

    Attributes:
        step: The step.
        reward_mean: Mean reward of the samples; at step 0, of one per held-out problem.
        accuracy: Share of the held-out problems that greedy decoding solves after the step.
        loss: Mean over the optimizer steps.
        grad_norm: The same, before clipping.
        kl: KL against the reference per token, k3 estimator.
        entropy: Of the policy per token in nats, estimated from the sampled tokens.
        tokens_per_s: Tokens of prompts and completions per second of the step.
        step_s: Seconds of the step, without the measurement of accuracy.
        generate_s: Seconds of sampling.
        logprob_s: Seconds of old and reference log-probabilities.
        train_s: Seconds of optimizer steps.
        refit_s: Seconds of handing weights to inference engines; 0.0 where there are none.
        engines: With engines, and under names of their own: the report of the refit that brought
            what was sampled from (`refit_bytes`, `refit_gb_per_s`, `refit_load_s` ...), its
            `weight_version`, and how far the engines' log-probabilities are from the trainer's
            (`mismatch_mean_abs` ..., see `sampler_mismatch`).
    """

    step: int
    reward_mean: float | None = None
    accuracy: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    kl: float | None = None
    entropy: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    generate_s: float | None = None
    logprob_s: float | None = None
    train_s: float | None = None
    refit_s: float = 0.0
    engines: Mapping[str, float] = field(default_factory=dict)

    def headline(self) -> dict[str, float | None]:
        """Return what a progress bar shows."""
        return {"reward": self.reward_mean, "accuracy": self.accuracy}


@dataclass(frozen=True, kw_only=True, slots=True)
class SftMetrics:
    """What is measured in a supervised step; None where it was not.

    Attributes:
        step: The step.
        accuracy: Share of the held-out problems that greedy decoding solves after the step.
        pass_rate: Share of the validation problems that one of several samples solves.
        loss: Negative log-likelihood per target token in nats.
        grad_norm: Norm of the gradient, before clipping.
        tokens_per_s: Tokens of prompts and answers per second of the step.
        step_s: Seconds of the step, without measurements.
    """

    step: int
    accuracy: float | None = None
    pass_rate: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None

    def headline(self) -> dict[str, float | None]:
        """Return what a progress bar shows."""
        return {"loss": self.loss, "accuracy": self.accuracy, "pass rate": self.pass_rate}


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Writes the metrics of each step as they come.

    A run that is continued takes up the files where its checkpoint was: what was measured after it
    is dropped, and measured again.

    Args:
        path: The JSON lines.
        tensorboard: The directory of the events.
        resumed_step: Last step to keep of what is there; None for a new run.
    """

    def __init__(self, path: Path, tensorboard: Path, *, resumed_step: int | None = None) -> None:
        if resumed_step is not None:
            write_durably(path, _lines_up_to(path, resumed_step))
        purge_step = None if resumed_step is None else resumed_step + 1
        self._file = path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(tensorboard), purge_step=purge_step)

    def write(
        self, metrics: GrpoMetrics | SftMetrics, diagnostics: Mapping[str, float] | None = None
    ) -> None:
        """Write the metrics of one step. What is not finite becomes null, as JSON has no name.

        Args:
            metrics: For both files.
            diagnostics: Numbers for TensorBoard alone.
        """
        measured = asdict(metrics)
        measured |= measured.pop("engines", {})
        row = {name: _finite_or_none(value) for name, value in measured.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        del row["step"]
        for name, value in {**row, **(diagnostics or {})}.items():
            if value is not None:
                self._events.add_scalar(name, value, metrics.step)
        self._events.flush()

    def sync(self) -> None:
        """Bring what was written to the disk."""
        os.fsync(self._file.fileno())

    def __exit__(self, *exception: object) -> None:
        """Close the files."""
        self._file.close()
        self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of metrics."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sum_micro_batches(
    all_mb_metrics: Mapping[str, Sequence[float]], *, num_steps: int
) -> dict[str, float]:
    """Return the mean over optimizer steps of metrics that add up over micro-batches.

    Args:
        all_mb_metrics: `{name: one value per micro-batch}`, of all steps and ranks.
        num_steps: Optimizer steps.
    """
    return {name: math.fsum(values) / num_steps for name, values in all_mb_metrics.items()}


def _lines_up_to(path: Path, step: int) -> str:
    """Return the lines of the steps up to `step`; the last line may have been cut off."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return "".join(line for line in whole if json.loads(line)["step"] <= step)


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
