"""A run in progress in the terminal: follows its `metrics.jsonl` until the run ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rl_policy.report.run_data import read_rows, require_run
from rl_policy.run.directory import RunDirectory
from rl_policy.run.environment import state_of
from rl_policy.run.metrics import Row

_POLL_S = 0.5
_MOST_ROWS = 15
_COLUMNS = {
    "reward_mean": "reward",
    "accuracy": "accuracy",
    "reward": "held-out reward",
    "pass_rate": "pass rate",
    "heldout_margin": "margin",
    "loss": "loss",
    "kl": "kl",
    "entropy": "entropy",
    "completion_length_mean": "length",
    "tokens_per_s": "tokens/s",
    "step_s": "seconds",
}


def watch(path: Path, console: Console) -> str:
    """Show the last steps of a run until it ends, and return how it has.

    On a terminal it is a table that is drawn anew, elsewhere a line for each step.

    Args:
        path: The run directory.
        console: Where to show it.

    Raises:
        ValueError: The directory holds no run.
    """
    directory = require_run(path)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            for phase, rows in _follow(directory):
                live.update(_table(phase, rows))
    else:
        seen: dict[str, int] = {}
        for phase, rows in _follow(directory):
            for row in rows[seen.get(phase, 0) :]:
                console.print(_line(phase, row), highlight=False, markup=False, soft_wrap=True)
            seen[phase] = len(rows)
    return state_of(directory)


def _follow(directory: RunDirectory) -> Iterator[tuple[str, list[Row]]]:
    """Yield the phase in progress and its rows, again and again until the run has ended."""
    while True:
        # The state first: what a run writes before it ends is then read for sure.
        state = state_of(directory)
        rows = read_rows(directory.metrics)
        warm_up = read_rows(RunDirectory(directory.warm_up).metrics)
        if warm_up:
            yield "warm-up", warm_up
        if rows or not warm_up:
            yield "run", rows
        if state != "running":
            return
        time.sleep(_POLL_S)


def _table(phase: str, rows: Sequence[Row]) -> Table:
    shown = rows[-_MOST_ROWS:]
    names = [name for name in _COLUMNS if any(row.get(name) is not None for row in shown)]
    table = Table(title=phase if rows else f"{phase}: no step yet")
    for head in ("step", *(_COLUMNS[name] for name in names)):
        table.add_column(head, justify="right")
    for row in shown:
        table.add_row(f"{row['step']:g}", *(_number(row.get(name)) for name in names))
    return table


def _line(phase: str, row: Row) -> str:
    numbers = (
        f"{head} {_number(value)}"
        for name, head in _COLUMNS.items()
        if (value := row.get(name)) is not None
    )
    return "  ".join([f"{phase:<8} step {row['step']:g}", *numbers])


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3f}"
