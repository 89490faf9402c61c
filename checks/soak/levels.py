"""What a run holds at a step, and how much more of it at its end than after its first steps."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

_MIB = 2**20
_COMPILED = "torchinductor_"
_SHARED_MEMORY = Path("/dev/shm")
# The share of the steps in which caches fill, and the share by which a level is told.
_WARM_UP, _WINDOW = 0.1, 0.1
# More than these, and more than the share of them below, is growth: an allocator is not exact.
_ALLOWED_SHARE = 0.01
_ALLOWED_MIB, _ALLOWED_COUNT = 4.0, 1.0

Levels = dict[str, float]
"""By name, `driver memory MiB` say."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How a level has changed over a run.

    Attributes:
        name: Of the level.
        first: Median after the warm-up.
        last: Median at the end.
        slope: Change in 1,000 steps, by least squares.
    """

    name: str
    first: float
    last: float
    slope: float

    @property
    def is_excessive(self) -> bool:
        """Whether the level ends more than 1 % above where it began, and 4 MiB or one more."""
        least = _ALLOWED_MIB if "MiB" in self.name else _ALLOWED_COUNT
        return self.last - self.first > max(_ALLOWED_SHARE * self.first, least)

    def __str__(self) -> str:
        """Return a line of a table."""
        share = (self.last - self.first) / self.first if self.first else 0.0
        mark = "  GROWS" if self.is_excessive else ""
        return (
            f"{self.name:<32}{self.first:>10.1f}{self.last:>10.1f}{share:>9.2%}{self.slope:>12.3f}"
            f"{mark}"
        )


HEADER = f"{'level':<32}{'begin':>10}{'end':>10}{'change':>9}{'/1000 steps':>12}"


@dataclass
class Record:
    """The levels of a run, by step."""

    _series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, step: int, levels: Mapping[str, float]) -> None:
        """Note what was measured at a step."""
        for name, value in levels.items():
            self._series.setdefault(name, []).append((step, value))

    def growths(self) -> list[Growth]:
        """Return the growth of each level that was measured from the warm-up to the end."""
        last_step = max(step for series in self._series.values() for step, _ in series)
        found = [growth_of(name, series, last_step) for name, series in self._series.items()]
        return [growth for growth in found if growth is not None]


def growth_of(name: str, series: Sequence[tuple[int, float]], last_step: int) -> Growth | None:
    """Return the growth of one level; None if it was not measured at both ends of the run."""
    begin, end = _WARM_UP * last_step, (1 - _WINDOW) * last_step
    kept = [(step, value) for step, value in series if step >= begin]
    first = [value for step, value in kept if step <= begin + _WINDOW * last_step]
    last = [value for step, value in kept if step >= end]
    if not first or not last:
        return None
    steps, values = np.array(kept).T
    slope = float(np.polyfit(steps, values, 1)[0]) * 1000
    return Growth(name, statistics.median(first), statistics.median(last), slope)


def levels_of(driver: psutil.Process, temporary: Path) -> Levels:
    """Return what a run holds now.

    Args:
        driver: The process of the run; those below it are its own.
        temporary: Its temporary directory, in which Ray keeps its logs as well.
    """
    levels: Levels = {}
    for name, process in named_processes(driver).items():
        try:
            levels[f"{name} memory MiB"] = process.memory_full_info().uss / _MIB
            levels[f"{name} descriptors"] = process.num_fds()
            levels[f"{name} threads"] = process.num_threads()
            if name == "raylet":
                levels["object store MiB"] = process.memory_info().shared / _MIB
        except psutil.NoSuchProcess:
            continue
    mapped = mapped_files([driver.pid, *(each.pid for each in _below(driver))])
    shared = [path.stat() for path in _existing(_SHARED_MEMORY) if path.name in mapped]
    levels["shared memory MiB"] = sum(each.st_blocks * 512 for each in shared) / _MIB
    levels["shared memory files"] = len(shared)
    levels["temporary files"] = len(left_in(temporary))
    return levels


def named_processes(driver: psutil.Process) -> dict[str, psutil.Process]:
    """Return the processes of a run by what they are: `driver`, `rank 0`, `engine 0`, `raylet`."""
    found = {"driver": driver}
    for process in sorted(_below(driver), key=lambda each: each.pid):
        kind = _kind_of(process)
        if kind in ("rank", "engine"):
            number = sum(name.startswith(kind) for name in found)
            found[f"{kind} {number}"] = process
        elif kind is not None:
            found[kind] = process
    return found


def _kind_of(process: psutil.Process) -> str | None:
    try:
        command = " ".join(process.cmdline())
        for name in ("raylet/raylet", "gcs_server"):
            if name in command.partition(" ")[0]:
                return name.rpartition("/")[2]
        if not command.startswith("ray::WorkerHost"):
            return None
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None
    return "engine" if "/vllm/" in maps else "rank"


def mapped_files(pids: Iterable[int]) -> set[str]:
    """Return the names of the shared memory that processes map."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, place, name = line.partition(f" {_SHARED_MEMORY}/")
                found |= {name} if place else set()
    return found


def shared_files() -> set[str]:
    """Return the names of all shared memory of this machine."""
    return {path.name for path in _existing(_SHARED_MEMORY)}


def _below(driver: psutil.Process) -> list[psutil.Process]:
    try:
        return driver.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def left_in(temporary: Path) -> list[str]:
    """Return what lies in a temporary directory, without Ray's logs and what torch compiles."""
    names = [path.name for path in _existing(temporary)]
    return sorted(name for name in names if name != "ray" and not name.startswith(_COMPILED))


def _existing(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.exists()]
