"""The measurements of a run: JSON lines, trackers, the progress bar and the picture."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rl_interfaces import TrainOutputSpec

from rl_policy.run.directory import write_durably
from rl_policy.run.trackers import Tracker, with_field_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row: TypeAlias = dict[str, float | None]
"""A line of `metrics.jsonl`: numbers by name, None if one was not measured or is not finite."""

HELDOUT_REWARD = "reward"
"""The column of the mean reward of greedy completions of held-out problems. It takes the place of
`accuracy` in runs whose reward is not 1 for a solved problem and 0 for any other."""

_LOGGER = logging.getLogger(__name__)

_REWARD_COLOR, _ACCURACY_COLOR = "#4c72b0", "#c44e52"


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
        diagnostics: Numbers for trackers alone.
        score_column: The column that says how good the model is on held-out data, larger being
            better: the checkpoint with the best is kept, and the summary of a run shows it. In its
            place a run may have `HELDOUT_REWARD`.
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
        if self.score_column is None:
            return None
        row = self.row()
        score = row[self.score_column]
        return row.get(HELDOUT_REWARD) if score is None else score

    def shown(self) -> Row:
        """Return what the progress bar shows."""
        row = self.row()
        shown = {name: row[column] for name, column in self.headline.items()}
        if HELDOUT_REWARD in self.extra:
            shown["held-out reward"] = row[HELDOUT_REWARD]
        return shown


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Appends the metrics of each step to the JSON lines, and hands them to trackers.

    A resumed run continues the file at its checkpoint: steps measured after it are dropped, and
    measured again.

    Args:
        path: The JSON lines.
        trackers: Closed with the log.
        resumed_step: Last step to keep of what is there; None for a new run.
    """

    def __init__(
        self, path: Path, *, trackers: Sequence[Tracker] = (), resumed_step: int | None = None
    ) -> None:
        if resumed_step is not None:
            keep_steps(path, resumed_step)
        self._file = path.open("a", encoding="utf-8")
        self._trackers = trackers

    def write(self, metrics: StepMetrics) -> None:
        """Write the metrics of one step. What is not finite becomes null, as in JSON."""
        row = {name: _finite_or_none(value) for name, value in metrics.row().items()}
        self._file.write(json.dumps(row) + "\n")
        # A reader may follow the file during the run.
        self._file.flush()
        del row["step"]
        everything = {**row, **metrics.diagnostics}
        numbers = {name: value for name, value in everything.items() if value is not None}
        for tracker in self._trackers:
            tracker.log(with_field_names(numbers), step=metrics.step)

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._file.fileno())

    def __exit__(self, *exception: object) -> None:
        """Close the file and the trackers."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a `metrics.jsonl`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def find_scores(rows: Sequence[Row], column: str | None) -> tuple[str | None, list[float]]:
    """Return the name of the score of a run, and the scores in the order of the steps.

    Args:
        rows: The objects of `metrics.jsonl`.
        column: The score column of the recipe; None if it has none.
    """
    for name in () if column is None else (column, HELDOUT_REWARD):
        scores = [value for row in rows if (value := row.get(name)) is not None]
        if scores:
            return name, scores
    return column, []


def mean_metrics(result: TrainOutputSpec) -> dict[str, float]:
    """Return what `train` measured as means over its optimizer steps.

    Args:
        result: What `Policy.train` returned. The metrics of its loss add up over micro-batches to
            a number of the global batch.

    Returns:
        `loss`, `grad_norm` unless in eval mode, and the loss's own metrics.
    """
    num_steps = len(result["loss"])
    # An exact sum: the order in which ranks report must not change a digit.
    sums = {name: math.fsum(values) for name, values in result["all_mb_metrics"].items()}
    means = {name: total / num_steps for name, total in sums.items()}
    for name in ("loss", "grad_norm"):
        if (values := result[name]) is not None:
            means[name] = float(values.mean())
    return means


class RunDisplay:
    """A progress bar per phase of a run, and a line for each measurement.

    Args:
        console: Where to show it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def phase(self, name: str, *, total: int, completed: int) -> Iterator[Phase]:
        """Show a bar for the steps of one phase.

        Args:
            name: Of the phase.
            total: Steps.
            completed: Steps that were taken before.
        """
        columns = (
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            yield Phase(progress, name=name, total=total, completed=completed)

    def note(self, text: str) -> None:
        """Show a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class Phase:
    """The bar of one phase, see `RunDisplay.phase`."""

    def __init__(self, progress: Progress, *, name: str, total: int, completed: int) -> None:
        self._progress = progress
        self._name = name
        self._total = total
        self._latest: dict[str, float] = {}
        self._task = progress.add_task(name, total=total, completed=completed, numbers="")

    def advance(self, step: int, numbers: Mapping[str, float | None], *, is_measured: bool) -> None:
        """Move the bar to `step`.

        Args:
            step: The step.
            numbers: Shown beside the bar; None keeps the number that is there.
            is_measured: Whether the step has a score: it leaves a line above the bar.
        """
        known = {name: value for name, value in numbers.items() if value is not None}
        self._latest = {**self._latest, **known}
        text = "  ".join(f"{name} {value:.3f}" for name, value in self._latest.items())
        self._progress.update(self._task, completed=step, numbers=text)
        if is_measured:
            line = f"{self._name:<8} step {step}/{self._total}  {text}"
            self._progress.console.print(line, highlight=False)


def plot_reward(rows: Sequence[Row], path: Path) -> None:
    """Write training reward and held-out accuracy, or reward, over the steps as a PNG.

    Without matplotlib, of the extra `plot`, the log says that there is no picture.

    Args:
        rows: The objects of `metrics.jsonl`.
        path: The picture.
    """
    if find_spec("matplotlib") is None:
        _LOGGER.warning(
            '%s is not drawn, as matplotlib is not installed: pip install "rl-policy[plot]"', path
        )
        return
    # At the end of a run: half a second that its first step would wait for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    reward, accuracy = _points(rows, "reward_mean"), _points(rows, "accuracy")
    heldout = accuracy or _points(rows, HELDOUT_REWARD)
    name = "accuracy" if accuracy else "reward"
    axes.plot(*_columns(reward), color=_REWARD_COLOR, linewidth=1.2)
    axes.plot(*_columns(heldout), color=_ACCURACY_COLOR, linewidth=2, marker="o", markersize=4)
    is_reward_above = (reward[-1][1] if reward else 0.0) > (heldout[-1][1] if heldout else 0.0)
    # The names stand beside the last points, one above the other, so that they never overlap.
    _label_end(axes, reward, "train reward\n(sampled)", _REWARD_COLOR, is_above=is_reward_above)
    label = f"held-out {name}\n(greedy)"
    _label_end(axes, heldout, label, _ACCURACY_COLOR, is_above=not is_reward_above)
    axes.set_xlabel("step")
    if accuracy:
        axes.set_ylabel("share of answers that are right")
        axes.set_ylim(-0.02, 1.05)
    else:
        axes.set_ylabel("reward")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    if heldout:
        (_, first), (_, last) = heldout[0], heldout[-1]
        axes.set_title(f"Held-out {name} {first:.2f} \u2192 {last:.2f}", loc="left")
    figure.savefig(path, dpi=150)


def _label_end(
    axes: Axes, points: Sequence[tuple[float, float]], text: str, color: str, *, is_above: bool
) -> None:
    if points:
        axes.annotate(
            text,
            points[-1],
            xytext=(8, 2 if is_above else -2),
            textcoords="offset points",
            va="bottom" if is_above else "top",
            color=color,
            annotation_clip=False,
        )


def _points(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    return [(row["step"] or 0, value) for row in rows if (value := row.get(name)) is not None]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def keep_steps(path: Path, step: int) -> None:
    """Drop the JSON lines of the steps after `step`, and a last line that is incomplete."""
    write_durably(path, _lines_up_to(path, step))


def _lines_up_to(path: Path, step: int) -> str:
    """Return the lines of the steps up to `step`; the last line may be incomplete."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]
    return "".join(line for line in complete if json.loads(line)["step"] <= step)


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
