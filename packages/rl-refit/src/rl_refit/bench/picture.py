"""What was measured, in numbers and over time."""

# matplotlib annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from rl_refit.bench.ends import Round
from rl_refit.report import RefitReport

PHASES = ("join", "gather", "pack", "wire", "verify", "load", "resume")
# Distinct for the colour-blind (Okabe and Ito 2008).
_COLORS = ("#999999", "#56b4e9", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
_COLUMNS = 72


Ends = Mapping[str, Sequence[RefitReport]]
"""The reports of the rounds by the name of the end that made them, the sender's first."""


def summary(rounds: Sequence[Round], *, title: str) -> str:
    """Return medians over some rounds against copies in memory, and `table`."""
    ratio = median(each.copy_s / each.sent.seconds for each in rounds)
    copy_s = median(each.copy_s for each in rounds)
    seconds = median(each.sent.seconds for each in rounds)
    last = rounds[-1].sent
    lines = [
        title,
        f"{'copied within the process':28}{copy_s:10.4f} s {last.bytes / copy_s / 1e9:8.2f} GB/s",
        f"{'sent':28}{seconds:10.4f} s {last.bytes / seconds / 1e9:8.2f} GB/s"
        f"   {ratio:.2f} of a copy's speed",
        f"{'bytes to each receiver':28}{last.bytes_sent / last.bytes:10.4f} of all",
        "",
        table(ends_of(rounds)),
    ]
    return "\n".join(lines)


def ends_of(rounds: Sequence[Round]) -> Ends:
    """Return the reports of each end."""
    ends = {"sender": [each.sent for each in rounds]}
    for rank in range(len(rounds[-1].received)):
        ends[f"receiver {rank}"] = [each.received[rank] for each in rounds]
    return ends


def table(ends: Ends) -> str:
    """Return the median seconds of each phase, and when each ran in the last round."""
    lines = [f"{'seconds':28}" + "".join(f"{phase:>9}" for phase in PHASES)]
    for name, reports in ends.items():
        medians = (median(getattr(each, f"{phase}_s") for each in reports) for phase in PHASES)
        lines.append(f"{name:28}" + "".join(f"{seconds:9.4f}" for seconds in medians))
    return "\n".join([*lines, "", *timeline({name: each[-1] for name, each in ends.items()})])


def timeline(ends: Mapping[str, RefitReport]) -> list[str]:
    """Return lines that show when each phase of each end ran, from the first end's beginning on."""
    start, end = _limits(ends)
    width = (end - start) / _COLUMNS or 1.0
    lines: list[str] = []
    for name, report in ends.items():
        for phase in PHASES:
            columns = [" "] * _COLUMNS
            for span in report.spans:
                if span.phase == phase and span.end >= start:
                    first, last = (int(max(at - start, 0.0) / width) for at in span[1:])
                    for column in range(first, min(last, _COLUMNS - 1) + 1):
                        columns[column] = "█"
            if any(column != " " for column in columns):
                lines.append(f"{name:12}{phase:8}|{''.join(columns)}|")
    return [*lines, f"{'':20}|{'0':<{_COLUMNS - 10}}{end - start:8.4f} s|"]


def _limits(ends: Mapping[str, RefitReport]) -> tuple[float, float]:
    """Return when the first of the ends began, and when all had ended."""
    spans = [report.spans for report in ends.values()]
    return min(span.start for span in spans[0]), max(span.end for each in spans for span in each)


def draw(ends: Mapping[str, RefitReport], path: Path) -> None:
    """Write a picture of what `timeline` shows, in the format of the file's ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    start, end = _limits(ends)
    figure = Figure(figsize=(11, 1.2 + 0.9 * len(ends)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    height = 0.8 / len(PHASES)
    for row, report in enumerate(ends.values()):
        for place, (phase, color) in enumerate(zip(PHASES, _COLORS, strict=True)):
            spans = [span for span in report.spans if span.phase == phase]
            bars = [(span.start - start, span.end - span.start) for span in spans]
            axes.broken_barh(bars, (-row + 0.4 - (place + 1) * height, height), color=color)
    axes.set_yticks([-row for row in range(len(ends))], list(ends))
    axes.set_xlim(0, end - start)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [
        Patch(color=color, label=phase) for phase, color in zip(PHASES, _COLORS, strict=True)
    ]
    axes.legend(handles=patches, ncols=len(PHASES), loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(path, dpi=150)
