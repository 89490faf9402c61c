"""The charts of a report, from the rows of one run or several.

Each chart is a figure of plotly. A column that no chart names has a chart of its own, so that the
metrics of any recipe are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rl_policy.report.run_data import RunData
from rl_policy.run.metrics import Row

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

RunRows: TypeAlias = Mapping[str, Sequence[Row]]
"""The rows of each run, by its name."""

PHASES = ("generate_s", "reward_s", "logprob_s", "value_s", "train_s", "refit_s", "move_s")
"""The columns whose sum is nearly `step_s`."""

# Distinct for the colour-blind (Okabe and Ito 2008).
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_DASHES = ("solid", "dot", "dash", "dashdot")


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of columns over the steps.

    Attributes:
        title: Its heading.
        unit: Of the vertical axis.
        columns: What it shows, where a run has it.
    """

    title: str
    unit: str
    columns: tuple[str, ...]


CHARTS = (
    Chart("Reward", "mean of the samples", ("reward_mean", "reward_std")),
    Chart("Held-out accuracy", "share", ("accuracy", "pass_rate")),
    Chart("Held-out reward", "mean of greedy completions", ("reward",)),
    Chart("Loss", "loss", ("loss",)),
    Chart("Loss of the value model", "per token", ("value_loss",)),
    Chart("Returns explained by the values", "share of the variance", ("explained_variance",)),
    Chart("Clipped tokens", "share", ("clip_fraction", "value_clip_fraction")),
    Chart("KL to the reference", "nats per token", ("kl",)),
    Chart("Entropy", "nats per token", ("entropy",)),
    Chart("Gradient norm", "norm", ("grad_norm", "value_grad_norm")),
    Chart("Completion lengths", "tokens", ("completion_length_mean", "completion_length_max")),
    Chart(
        "Truncated completions, prompts without advantage",
        "share",
        ("truncated_share", "zero_advantage_share"),
    ),
    Chart(
        "Mismatch of sampler and trainer",
        "nats",
        ("mismatch_mean_abs", "mismatch_max_abs", "mismatch_kl"),
    ),
    Chart("Staleness", "optimizer steps", ("staleness",)),
    Chart("Margins", "reward", ("reward_margin", "heldout_margin")),
    Chart("Rewards of chosen and rejected", "reward", ("chosen_reward", "rejected_reward")),
    Chart("Throughput", "tokens per second", ("tokens_per_s", "tokens_per_s_per_device")),
    Chart("Model FLOPs", "TFLOPs per second and device", ("tflops_per_s_per_device",)),
    Chart("Model FLOPs utilization", "share of the peak", ("mfu",)),
    Chart("Peak memory", "GiB of a rank", ("peak_memory_gib",)),
)
"""The charts of known columns, in the order of the page."""


def build_charts(runs: Sequence[RunData]) -> dict[str, Figure]:
    """Return the charts of one run or several by title, in the order of the page."""
    rows: RunRows = {run.name: run.rows for run in runs}
    charts = _line_charts(rows)
    timing = _phase_chart(rows) if len(runs) == 1 else _mean_phase_chart(rows)
    if timing is not None:
        charts["Time per phase"] = timing
    return charts


def build_warm_up_charts(runs: Sequence[RunData]) -> dict[str, Figure]:
    """Return the charts of the warm-ups; empty where no run has one."""
    return _line_charts({run.name: run.warm_up for run in runs if run.warm_up})


def _line_charts(rows: RunRows) -> dict[str, Figure]:
    known = {column for chart in CHARTS for column in chart.columns}
    known |= {"step", "step_s", *PHASES}
    measured = dict.fromkeys(
        name
        for each in rows.values()
        for row in each
        for name, value in row.items()
        if value is not None
    )
    parts = tuple(name for name in measured if name.startswith("reward/"))
    charts = [
        *CHARTS[:1],
        *([Chart("Parts of the reward", "mean", parts)] if parts else []),
        *CHARTS[1:],
        *(Chart(name, "", (name,)) for name in measured if name not in known | {*parts}),
    ]
    built = {chart.title: _line_chart(chart, rows) for chart in charts}
    return {title: figure for title, figure in built.items() if figure is not None}


def _line_chart(chart: Chart, rows: RunRows) -> Figure | None:
    """Return the chart; None if no run has measured any of its columns."""
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for run, (name, of_run) in enumerate(rows.items()):
        for index, column in enumerate(chart.columns):
            points = [
                (row["step"], value) for row in of_run if (value := row.get(column)) is not None
            ]
            if not points:
                continue
            # One run: a colour for each column. Several: one for each run.
            color = _COLORS[(index if len(rows) == 1 else run) % len(_COLORS)]
            figure.add_trace(
                Scatter(
                    x=[step for step, _ in points],
                    y=[value for _, value in points],
                    name=_label(name, column, num_runs=len(rows), num_columns=len(chart.columns)),
                    mode="lines+markers" if len(points) <= 40 else "lines",
                    line={
                        "color": color,
                        "dash": "solid" if len(rows) == 1 else _DASHES[index % len(_DASHES)],
                    },
                )
            )
    return _with_layout(figure, chart.unit) if figure.data else None


def _label(run: str, column: str, *, num_runs: int, num_columns: int) -> str:
    if num_runs == 1:
        return column
    return run if num_columns == 1 else f"{run}: {column}"


def _phase_chart(rows: RunRows) -> Figure | None:
    """Return the seconds of each step, stacked by phase; None if none were measured."""
    from plotly.graph_objects import Bar, Figure

    (of_run,) = rows.values()
    timed = [row for row in of_run if row.get("step_s") is not None]
    figure = Figure()
    for index, (phase, seconds) in enumerate(_phases(timed).items()):
        figure.add_trace(
            Bar(
                x=[row["step"] for row in timed],
                y=seconds,
                name=phase,
                marker={"color": _COLORS[index % len(_COLORS)]},
            )
        )
    figure.update_layout(barmode="stack", bargap=0)
    return _with_layout(figure, "seconds") if timed else None


def _mean_phase_chart(rows: RunRows) -> Figure | None:
    """Return the mean seconds of a step of each run, stacked by phase."""
    from plotly.graph_objects import Bar, Figure

    timed = {
        name: [row for row in of_run if row.get("step_s") is not None]
        for name, of_run in rows.items()
    }
    timed = {name: of_run for name, of_run in timed.items() if of_run}
    phases = {name: _phases(of_run) for name, of_run in timed.items()}
    names = dict.fromkeys(phase for of_run in phases.values() for phase in of_run)
    figure = Figure()
    for index, phase in enumerate(names):
        means = [_mean(of_run.get(phase, [])) for of_run in phases.values()]
        color = _COLORS[index % len(_COLORS)]
        figure.add_trace(Bar(x=list(phases), y=means, name=phase, marker={"color": color}))
    figure.update_layout(barmode="stack")
    return _with_layout(figure, "mean seconds of a step", axis="run") if timed else None


def _phases(timed: Sequence[Row]) -> dict[str, list[float]]:
    """Return the seconds of each phase and of what is none of them, by phase."""
    seconds = {phase: [row.get(phase) or 0.0 for row in timed] for phase in PHASES}
    sums = [sum(column) for column in zip(*seconds.values(), strict=True)]
    seconds["other"] = [
        max(0.0, (row["step_s"] or 0.0) - total) for row, total in zip(timed, sums, strict=True)
    ]
    return {phase.removesuffix("_s"): column for phase, column in seconds.items() if any(column)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _with_layout(figure: Figure, unit: str, *, axis: str = "step") -> Figure:
    return figure.update_layout(
        template="plotly_white",
        height=300,
        margin={"l": 56, "r": 12, "t": 12, "b": 40},
        xaxis={"title": {"text": axis}, "automargin": True},
        yaxis={"title": {"text": unit}, "automargin": True, "rangemode": "tozero"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        showlegend=sum(1 for _ in figure.select_traces()) > 1,
        hovermode="x unified",
    )
