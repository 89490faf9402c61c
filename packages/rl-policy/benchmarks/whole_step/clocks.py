"""Wall clock and processor seconds of a whole process tree, divided by phase.

Linux alone: processes are found in `/proc`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OTHER = "other"
"""What is in no phase."""


class ProcessTree:
    """A process and its descendants, and the processor seconds that these have used.

    Args:
        root: The process id of the first.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._used: dict[int, float] = {}
        self.refresh()

    def refresh(self) -> None:
        """Find processes that were started since the last call."""
        for pid in descendants(self._root):
            self._used.setdefault(pid, 0.0)

    def seconds(self) -> float:
        """Return what all of them have used; of one that has ended, what was last known.

        A system call each, to the nanosecond; `/proc` would count in ticks of 10 ms.
        """
        for pid in self._used:
            try:
                # The clock of another process, as `clock_getcpuclockid(3)` computes its id.
                self._used[pid] = time.clock_gettime((~pid << 3) | 2)
            except OSError:  # it has ended
                continue
        return sum(self._used.values())


def busy_seconds() -> float:
    """Return the processor seconds that all programs of the machine have used."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _waiting, *interrupts = map(int, fields[:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> dict[int, float]:
    """Return the processor seconds of a process and its descendants, with those that ended."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(entry.parent.name)
        parents[pid] = int(fields[1])
        used[pid] = sum(map(int, fields[11:15]))
    family = {root}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        grown = bool(more)
        family |= more
    ticks = os.sysconf("SC_CLK_TCK")
    return {pid: used[pid] / ticks for pid in family if pid in used}


class PhaseMeter:
    """Divides the time of steps among phases: each moment belongs to the innermost one.

    A step is everything from the end of one step to the end of the next. The file gets a line for
    each, `{"step", "at", "used", "busy", "phases": {name: [seconds, processor seconds]}}`. `at` is
    on the monotonic clock, which all processes share; `busy` is that of `busy_seconds`.

    Args:
        path: The file.
        root: The first process of the tree that is measured.
    """

    def __init__(self, path: Path, *, root: int) -> None:
        self.base = OTHER
        """The phase of what no `phase` encloses."""
        self.has_begun = False
        """Whether the start, step 0, has ended."""
        self._path = path
        self._root = root
        self._tree = ProcessTree(root)
        self._open: list[str] = []
        self._sums: dict[str, list[float]] = {}
        self._last = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block under `name`."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def end_step(self, step: int) -> None:
        """Write the line of a step, and begin the next."""
        self._count()
        used = sum(descendants(self._root).values()) if step == 0 else None
        line = {"step": step, "at": time.monotonic(), "used": used, "busy": busy_seconds()}
        with self._path.open("a") as file:
            file.write(json.dumps(line | {"phases": self._sums}) + "\n")
        self._sums = {}
        self.has_begun = True
        # What the search takes is in no step.
        self._tree.refresh()
        self._last = self._now()

    def set_base(self, name: str) -> None:
        """Count what no `phase` encloses under `name` from now on."""
        self._count()
        self.base = name

    def _count(self) -> None:
        name = self._open[-1] if self._open else self.base
        now = self._now()
        sums = self._sums.setdefault(name, [0.0, 0.0])
        for index, (after, before) in enumerate(zip(now, self._last, strict=True)):
            sums[index] += after - before
        self._last = now

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), self._tree.seconds()
