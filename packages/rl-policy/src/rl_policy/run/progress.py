"""The display of a run: a progress bar per phase, a line per measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


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
    """The bar of one phase.

    Args:
        progress: The display.
        name: Of the phase.
        total: Steps.
        completed: Steps that were taken before.
    """

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
