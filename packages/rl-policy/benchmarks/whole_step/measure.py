"""Run both sides in turns, each in processes of its own, and divide what they take by phase."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from whole_step.clocks import OTHER
from whole_step.work import BARE, Run, command, write_inputs

TIMEOUT_S = 900
MOST_TRIES = 3
PHASES = ("generate", "score", "train", "move", "refit", OTHER)
MEASURES = ("start", "first step", "step", *PHASES)

BESIDE = "beside"

Measured = dict[str, tuple[float, float]]
"""Wall-clock and processor seconds of each of `MEASURES`; under `BESIDE`, twice the share of the
machine's processors that other programs used during the steps."""


def measure_in_turns(runs: Sequence[Run], *, rounds: int, most_beside: float) -> list[Measured]:
    """Return what each of the runs takes, the mean over the rounds.

    Args:
        runs: They take turns.
        rounds: How often.
        most_beside: A run is repeated while other programs used a larger share of the processors
            during its steps, but not for ever: what is left of it is in the result.
    """
    measured: list[list[Measured]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, found in zip(runs, measured, strict=True):
            tries: list[Measured] = []
            while not tries or (tries[-1][BESIDE][0] > most_beside and len(tries) < MOST_TRIES):
                tries.append(measure(run))
                print(_progress(run, tries[-1]), flush=True)
            found.append(min(tries, key=lambda each: each[BESIDE]))
    return [_mean(found) for found in measured]


def _progress(run: Run, found: Measured) -> str:
    (start, _), (step, used), (beside, _) = found["start"], found["step"], found[BESIDE]
    variant = f", {run.variant}" if run.variant else ""
    return (
        f"{run.side}{variant}, {run.sampler}: start {start:.1f} s, step {step:.3f} s, {used:.3f} s "
        f"of processors, of which others used {beside:.0%}"
    )


def measure(run: Run) -> Measured:
    """Return what a run takes: start, first step, and the mean of the others by phase."""
    started, lines = _run(run, num_lines=run.work.steps + 1)
    return summarize(lines, started=started)


def measure_bare_start(run: Run, *, rounds: int) -> tuple[float, float]:
    """Return the wall-clock and processor seconds of `bare_side` for a run's model, the mean."""
    pairs: list[tuple[float, float]] = []
    for _ in range(rounds):
        started, (line,) = _run(replace(run, side=BARE), num_lines=1)
        pairs.append((line["at"] - started, line["used"]))
    return _mean_pair(pairs)


def _run(run: Run, *, num_lines: int) -> tuple[float, list[dict[str, Any]]]:
    """Return when a run was started, on the monotonic clock, and the first lines of its meter."""
    with tempfile.TemporaryDirectory(prefix="whole-step-") as folder:
        inputs = Path(folder)
        write_inputs(run.work, inputs)
        started = time.monotonic()
        with (inputs / "log").open("w") as log:
            process = subprocess.Popen(
                command(run, inputs), env=_environment(), stdout=log, stderr=log
            )
            try:
                process.wait(timeout=TIMEOUT_S)
            finally:
                stop(process)
        phases = inputs / "phases.jsonl"
        lines = phases.read_text().splitlines() if phases.exists() else []
        if process.returncode != 0 or len(lines) < num_lines:
            tail = (inputs / "log").read_text()[-6000:]
            raise RuntimeError(f"{run} ended with {process.returncode}:\n{tail}")
    return started, [json.loads(line) for line in lines[:num_lines]]


def _environment() -> dict[str, str]:
    beside = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, beside)),
        # Of both sides alike: engines and trainers share the processors.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a run that has not ended by itself, with what it has started."""
    if process.poll() is None:
        # Not at once by SIGKILL: torchrun would leave its ranks, and the driver its Ray.
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def summarize(lines: Sequence[dict[str, Any]], *, started: float) -> Measured:
    """Return the measures from what the meter of a run wrote."""
    start, first, *later = lines
    missing = {"generate", "score", "train"} - first["phases"].keys()
    if missing:
        # What the meter is put into has another name by now.
        raise RuntimeError(f"the meter has seen no {' and no '.join(sorted(missing))}")
    steps = [_step_of(line) for line in later]
    found: Measured = {
        "start": (start["at"] - started, start["used"]),
        "first step": _step_of(first),
        "step": _mean_pair(steps),
    }
    seconds = later[-1]["at"] - first["at"]
    others = later[-1]["busy"] - first["busy"] - sum(step[1] for step in steps)
    share = max(0.0, others / seconds / (os.cpu_count() or 1))
    found[BESIDE] = (share, share)
    for phase in PHASES:
        found[phase] = _mean_pair([tuple(line["phases"].get(phase, (0, 0))) for line in later])
    return found


def _step_of(line: dict[str, Any]) -> tuple[float, float]:
    parts = line["phases"].values()
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def _mean_pair(pairs: Sequence[Sequence[float]]) -> tuple[float, float]:
    return mean(pair[0] for pair in pairs), mean(pair[1] for pair in pairs)


def _mean(rounds: Sequence[Measured]) -> Measured:
    return {name: _mean_pair([each[name] for each in rounds]) for name in rounds[0]}
