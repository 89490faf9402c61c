"""Who was busy when, in a run whose parts do not wait for one another.

`timeline.jsonl` has a line for each span, in the order of their ends:

    {"what": "engine", "id": 12, "start": 1700000000.1, "end": 1700000000.4}
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Activity: TypeAlias = Literal["engine", "environment", "score", "train", "refit"]
"""`engine`: a turn is sampled; `environment`: a call of one is answered; `score` and `train`: the
policy; `refit`: weights are sent."""

MOST_SPANS = 200_000
"""Of a process: about 20 MB, and hundreds of steps with hundreds of episodes each."""

_LOGGER = logging.getLogger(__name__)
# Drawn as how many there are at a time, and as blocks.
_COUNTED: dict[Activity, str] = {"engine": "turns in engines", "environment": "calls of tools"}
_BLOCKS: dict[Activity, str] = {"score": "score", "train": "train", "refit": "refit"}
# Distinct for the colour-blind (Okabe and Ito 2008).
_COLORS: dict[Activity, str] = {
    "engine": "#0072b2",
    "environment": "#d55e00",
    "score": "#56b4e9",
    "train": "#009e73",
    "refit": "#cc79a7",
}


class Span(NamedTuple):
    """A time in which something was busy."""

    what: Activity
    id: int
    """The group of a turn or a call, by its ticket; otherwise the step."""
    start: float
    """Seconds since the epoch."""
    end: float
    """Seconds since the epoch."""


class Timeline:
    """Writes spans to a file, from any thread.

    Args:
        path: The file, which is appended to. None: nothing is written.
        most_spans: How many are written, after which the log says that the rest is left out.
    """

    def __init__(self, path: Path | None, *, most_spans: int = MOST_SPANS) -> None:
        self._path = path
        self._num_left = most_spans
        self._lock = threading.Lock()
        self._lines: list[str] = []
        # Spans are measured by a clock that nobody sets.
        self._epoch = time.time() - time.monotonic()
        if path is not None and path.exists():
            _drop_incomplete_line(path)

    def record(self, what: Activity, id: int, start: float, end: float) -> None:
        """Keep a span for `flush`.

        Args:
            what: What was busy.
            id: See `Span`.
            start: By `time.monotonic`.
            end: By `time.monotonic`.
        """
        if self._path is None:
            return
        span = Span(what, id, round(start + self._epoch, 4), round(end + self._epoch, 4))
        with self._lock:
            self._num_left -= 1
            if self._num_left >= 0:
                self._lines.append(json.dumps(span._asdict()) + "\n")
            elif self._num_left == -1:
                _LOGGER.warning("%s is full: what comes later is left out", self._path)

    @contextmanager
    def span(self, what: Activity, id: int) -> Iterator[None]:
        """Keep the time of the block."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.record(what, id, start, time.monotonic())

    def flush(self) -> None:
        """Write what was kept."""
        with self._lock:
            lines, self._lines = self._lines, []
        if self._path is not None and lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)


def _drop_incomplete_line(path: Path) -> None:
    """Remove what a killed run has not written to its end, as lines of this run come after it."""
    end = path.read_bytes().rfind(b"\n") + 1
    if end < path.stat().st_size:
        os.truncate(path, end)


def read_timeline(path: Path) -> list[Span]:
    """Return the spans of a file; what a killed run has not written to its end is left out."""
    with path.open(encoding="utf-8") as file:
        return [Span(**json.loads(line)) for line in file if line.endswith("\n")]


def num_busy(spans: Sequence[Span], what: Activity) -> tuple[list[float], list[int]]:
    """Return the times at which the number of spans of a kind changes, and the number from then on.

    Example, spans from 0 to 2 and from 1 to 3: [0, 1, 2, 3], [1, 2, 1, 0].
    """
    chosen = [span for span in spans if span.what == what]
    changes = sorted([(span.start, 1) for span in chosen] + [(span.end, -1) for span in chosen])
    times: list[float] = []
    numbers: list[int] = []
    number = 0
    for moment, change in changes:
        number += change
        if times and times[-1] == moment:
            numbers[-1] = number
        else:
            times.append(moment)
            numbers.append(number)
    return times, numbers


def plot_timeline(spans: Sequence[Span], path: Path) -> None:
    """Write a PNG of engines, environments, trainer and refits over time.

    Without matplotlib, of the extra `plot`, the log says that there is no picture.

    Args:
        spans: Of a run.
        path: The picture.
    """
    if not spans:
        return
    if find_spec("matplotlib") is None:
        _LOGGER.warning(
            '%s is not drawn, as matplotlib is not installed: pip install "rl-policy[plot]"', path
        )
        return
    # At the end of a run: half a second that its first step would wait for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first = min(span.start for span in spans)
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(_COUNTED) + 1, 1, sharex=True)
    for axes, (what, name) in zip(rows, _COUNTED.items(), strict=False):
        times, numbers = num_busy(spans, what)
        moments = [moment - first for moment in times]
        axes.fill_between(moments, numbers, step="post", color=_COLORS[what], alpha=0.7)
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_blocks(rows[-1], spans, first=first)
    rows[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=150)


def _draw_blocks(axes: Axes, spans: Sequence[Span], *, first: float) -> None:
    for row, (what, _) in enumerate(_BLOCKS.items()):
        bars = [(span.start - first, span.end - span.start) for span in spans if span.what == what]
        axes.broken_barh(bars, (-row - 0.4, 0.8), color=_COLORS[what])
    axes.set_yticks([-row for row in range(len(_BLOCKS))], list(_BLOCKS.values()))
    axes.spines[["top", "right"]].set_visible(False)
