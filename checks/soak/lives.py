"""The process of a run, which is watched, killed in parts, and continued."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from checks.soak.levels import (
    Record,
    left_in,
    levels_of,
    mapped_files,
    named_processes,
    shared_files,
)

_POLL_S, _MEASURE_S = 0.2, 3.0
# A step takes a tenth of a second; a start, half a minute.
_STALL_S = 300.0
_GONE_S = 20.0
# Read from a clock, or from who was the slowest.
_BY_THE_CLOCK = ("_s", "_rank")


@dataclass(frozen=True, slots=True)
class Kill:
    """An end that a run is put to.

    Attributes:
        step: It follows this step.
        victim: A name of `levels.named_processes`.
    """

    step: int
    victim: str


@dataclass(kw_only=True)
class Outcome:
    """What has become of a run.

    Attributes:
        rows: Its `metrics.jsonl`, without what is read from a clock.
        record: The levels.
        left: Shared memory and temporary files that it has left behind.
        seconds: From the first start to the end.
    """

    rows: list[dict[str, Any]]
    record: Record
    left: list[str]
    seconds: float


@dataclass
class Life:
    """One run, from its start to its end, in a temporary directory of its own.

    Args:
        config: The file with its configuration.
        out: The run directory, which does not exist.
        temporary: An empty directory with a short path, as sockets lie below it.
    """

    config: Path
    out: Path
    temporary: Path
    _seen: dict[int, psutil.Process] = field(default_factory=dict)

    def run(self, kills: Sequence[Kill]) -> Outcome:
        """Run to the end, and put each victim to its end on the way.

        Raises:
            RuntimeError: The run fails by itself, takes no steps, or leaves processes behind.
        """
        started, before = time.monotonic(), shared_files()
        record, left_kills = Record(), list(kills)
        process = self._start("--config", str(self.config), "--out", str(self.out))
        try:
            while self._watch(process, record, left_kills):
                # Killed itself: what is below it has to go by itself before the run goes on.
                self._wait_until_gone()
                process = self._start("--resume", str(self.out))
        finally:
            for each in self._seen.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self._wait_until_gone()
        # What other programs have made by now they still use.
        orphans = shared_files() - before - mapped_files(psutil.pids())
        left = [f"shared memory: {name}" for name in sorted(orphans)]
        left += [f"temporary file: {name}" for name in left_in(self.temporary)]
        if left_kills:
            raise RuntimeError(f"the run ended before {left_kills}")
        return Outcome(
            rows=rows_of(self.out / "metrics.jsonl"),
            record=record,
            left=left,
            seconds=time.monotonic() - started,
        )

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        program, folder = str(Path(sys.executable).with_name("rl-policy")), str(self.temporary)
        with (self.temporary.parent / f"{self.out.name}.log").open("ab") as log:
            process = subprocess.Popen(
                [program, "grpo", *arguments],
                stdout=log,
                stderr=log,
                env=os.environ | {"TMPDIR": folder, "RAY_TMPDIR": folder, "RAY_ADDRESS": "local"},
            )
        self._seen[process.pid] = psutil.Process(process.pid)
        return process

    def _watch(self, process: subprocess.Popen[bytes], record: Record, kills: list[Kill]) -> bool:
        """Watch a process to its end; return whether it was killed, and the run has to go on."""
        driver, metrics = self._seen[process.pid], self.out / "metrics.jsonl"
        measured = moved = time.monotonic()
        step, measured_step, killed_driver = -1, 0, False
        while process.poll() is None:
            time.sleep(_POLL_S)
            now, before = time.monotonic(), step
            step = _last_step(metrics)
            moved = now if step != before else moved
            if now - moved > _STALL_S:
                raise RuntimeError(f"the run takes no step after {step}: see its log")
            # Between two steps: a run that stands still is starting, or ends.
            if now - measured > _MEASURE_S and step > max(before, measured_step):
                measured, measured_step = now, step
                record.add(step, levels_of(driver, self.temporary))
                self._note(driver)
            # Not there: it is being started.
            due = bool(kills) and step >= kills[0].step
            victim = named_processes(driver).get(kills[0].victim) if due else None
            if victim is not None:
                self._note(driver)
                victim.send_signal(signal.SIGKILL)
                killed_driver = kills.pop(0).victim == "driver"
        if killed_driver:
            return True
        if process.returncode != 0:
            raise RuntimeError(f"the run ended with {process.returncode}: see its log")
        return False

    def _note(self, driver: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen |= {each.pid: each for each in driver.children(recursive=True)}

    def _wait_until_gone(self) -> None:
        """Wait for the end of all processes that were seen below the run.

        Raises:
            RuntimeError: Some are left.
        """
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=_GONE_S)
        if alive:
            raise RuntimeError(f"left after {_GONE_S:.0f} s: {alive}")


def rows_of(metrics: Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl`, without what is read from a clock."""
    return [
        {name: value for name, value in row.items() if not name.endswith(_BY_THE_CLOCK)}
        for row in map(json.loads, metrics.read_text().splitlines())
    ]


def _last_step(metrics: Path) -> int:
    """Return the last step that a file of metrics has; -1 before there is one."""
    for line in _lines_backwards(metrics):
        with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
            return int(json.loads(line)["step"])
    return -1


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the last lines of a file, the last one first; none if there is no file."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2**14))
        yield from reversed(file.read().splitlines()[-3:])
