"""The measurements of a run: one JSON object a step, and TensorBoard events of the same."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import perf_counter
from typing import ClassVar, TypeAlias

from torch.utils.tensorboard import SummaryWriter

from rl_policy.run.directory import write_durably

Row: TypeAlias = dict[str, float | None]
"""A line of `metrics.jsonl`: numbers by name, None if one was not measured or is not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What a recipe measures in a step; step 0 is before the first update.

    A recipe derives a dataclass from it. Each field that it adds is a column of `metrics.jsonl`,
    None by default: not measured.

    Example:
        @dataclass(frozen=True, kw_only=True, slots=True)
        class MyMetrics(StepMetrics):
            loss: float | None = None
            accuracy: float | None = None
            score_column: ClassVar[str] = "accuracy"
            headline: ClassVar[Mapping[str, str]] = {"loss": "loss", "accuracy": "accuracy"}

    Attributes:
        step: The step.
        extra: Further columns, which only some runs have.
        diagnostics: Numbers for TensorBoard alone.
        score_column: The column that says how good the model is on held-out data, larger being
            better: the checkpoint with the best is kept, and the summary of a run shows it.
        headline: What the progress bar shows, `{shown name: column}`.
    """

    step: int
    extra: Mapping[str, float] = field(default_factory=dict)
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    score_column: ClassVar[str | None] = None
    headline: ClassVar[Mapping[str, str]] = {}

    def row(self) -> Row:
        """Return all columns: the fields in their order, then the further ones."""
        names = [each.name for each in fields(self) if each.name not in ("extra", "diagnostics")]
        return {name: getattr(self, name) for name in names} | dict(self.extra)

    def score(self) -> float | None:
        """Return the number in the score column; None if it was not measured."""
        return None if self.score_column is None else self.row()[self.score_column]

    def shown(self) -> Row:
        """Return what the progress bar shows."""
        row = self.row()
        return {name: row[column] for name, column in self.headline.items()}


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Writes the metrics of each step as they come.

    A resumed run continues the files at its checkpoint: what was measured after it is dropped, and
    measured again.

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

    def write(self, metrics: StepMetrics) -> None:
        """Write the metrics of one step. What is not finite becomes null: JSON has no name for it.

        Args:
            metrics: Of the step.
        """
        row = {name: _finite_or_none(value) for name, value in metrics.row().items()}
        self._file.write(json.dumps(row) + "\n")
        # A reader may follow the file while the run goes on.
        self._file.flush()
        del row["step"]
        for name, value in {**row, **metrics.diagnostics}.items():
            if value is not None:
                self._events.add_scalar(name, value, metrics.step)
        self._events.flush()

    def sync(self) -> None:
        """Flush what was written to the disk."""
        os.fsync(self._file.fileno())

    def __exit__(self, *exception: object) -> None:
        """Close the files."""
        self._file.close()
        self._events.close()


class Stopwatch:
    """Measures the parts of a step, in seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record how long the block takes."""
        started = perf_counter()
        yield
        self.seconds[name] = perf_counter() - started


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a `metrics.jsonl`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sum_micro_batches(
    all_mb_metrics: Mapping[str, Sequence[float]], *, num_steps: int
) -> dict[str, float]:
    """Return the mean over optimizer steps of metrics that add up over micro-batches.

    Args:
        all_mb_metrics: `{name: one value per micro-batch}`, of all steps and ranks.
        num_steps: Optimizer steps.
    """
    # An exact sum: the order in which ranks report must not change a digit.
    return {name: math.fsum(values) / num_steps for name, values in all_mb_metrics.items()}


def _lines_up_to(path: Path, step: int) -> str:
    """Return the lines of the steps up to `step`; the last line may be incomplete."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]
    return "".join(line for line in complete if json.loads(line)["step"] <= step)


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
