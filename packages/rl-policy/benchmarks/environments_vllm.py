"""Measure GRPO with a slow tool: each step waits for its episodes, or trains while others go on.

A way is named after `async.too_old` and `async.max_staleness`.

A tiny model answers whether a number is odd. The tool that checks an answer takes 1 to 10 times as
long as a step without it, by a Pareto law: one answer in eight takes more than five times as long.
A wrong answer has a second try. All ways start from the same model and run in turns, for as many
steps as the synchronous one or for `--async-steps`, and the accuracy at the end is that of greedy
episodes of held-out problems.

Needs vLLM: `nox -s bench-vllm -- rl-policy environments_vllm`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOOL = '''
import asyncio, os, random

# The processes are forks of one another, and are not to draw the same numbers.
DRAWN = random.SystemRandom()
UNIT_S = float(os.environ["TOOL_UNIT_S"])


class Checked:
    """Says whether an answer is right, and gives a second try."""

    def reset(self, problem):
        self.answer, self.tries = problem.answer, 0

    async def step(self, text):
        await asyncio.sleep(UNIT_S * min(10.0, DRAWN.paretovariate(1.3)))
        self.tries += 1
        is_right = text == self.answer
        return "no\\n", is_right / self.tries, is_right or self.tries == 2
'''
SYNCHRONOUS = "synchronous"
WAYS: Mapping[str, Sequence[str]] = {
    SYNCHRONOUS: [],
    **{
        f"{too_old} {staleness}": [
            f"async.max_staleness={staleness}",
            f"async.too_old={too_old}",
        ]
        for too_old in ("wait", "rescore")
        for staleness in (1, 2, 3, 4)
    },
}
DEFAULT_WAYS = (SYNCHRONOUS, "wait 2", "wait 4", "rescore 4")
PROMPTS, SAMPLES = 8, 8
CONFIG = {
    "cluster": {"bundle_ct_per_node_list": [1]},
    "data": {"path": "problems.jsonl", "num_heldout": 64, "num_validation": 32},
    "policy": {
        "max_total_sequence_length": 32,
        "train_global_batch_size": PROMPTS * SAMPLES,
        "train_micro_batch_size": 32,
        "logprob_batch_size": 64,
        "optimizer": {"kwargs": {"lr": 1.0e-3}},
        "generation": {"max_new_tokens": 2, "backend": "vllm", "colocated": {"enabled": False}},
    },
    "environment": {"function": "tool.py:Checked", "max_turns": 2},
    "grpo": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "warm_up": False},
    "loss": {"kl_coef": 0.0},
    "checkpoint": {"every": 1000},
}
START = {
    "cluster": CONFIG["cluster"],
    "data": CONFIG["data"],
    "policy": {
        "max_total_sequence_length": 32,
        "train_global_batch_size": 32,
        "train_micro_batch_size": 16,
        "optimizer": {"kwargs": {"lr": 6.0e-3}},
        "generation": {"max_new_tokens": 2},
    },
    # A model that is right more often than not, so that few steps are left to learn.
    "sft": {"steps": 60, "eval_every": 2, "stop_pass_rate": 0.75, "pass_samples": 4},
}


def main() -> None:
    """Print a table of all ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="of the synchronous run")
    parser.add_argument(
        "--async-steps", type=int, help="of the others, if a step of theirs is worth less"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often each way runs, in turns")
    parser.add_argument("--ways", nargs="+", default=[*DEFAULT_WAYS], choices=[*WAYS])
    parser.add_argument("--out", type=Path, help="a directory for the runs; else they are removed")
    options = parser.parse_args()
    num_steps = dict.fromkeys(WAYS, options.async_steps or options.steps)
    num_steps[SYNCHRONOUS] = options.steps
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) if options.out is None else options.out
        place.mkdir(parents=True, exist_ok=True)
        write_inputs(place)
        run(place, "sft", ["--config", "start.json"], out="start", unit_s=0.0)
        unit_s = measure_unit(place)
        rows = [
            {"way": way, "round": number, **measure(place, way, number, num_steps[way], unit_s)}
            for number in range(options.rounds)
            for way in options.ways
        ]
    print(f"a step without the tool: {unit_s:.2f} s; the tool: {unit_s:.2f} to {10 * unit_s:.1f} s")
    print_table(rows)


def write_inputs(place: Path) -> None:
    """Write problems, the tool, and the configurations."""
    rows = [{"prompt": f"{number}?", "answer": str(number % 2)} for number in range(300)]
    (place / "problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (place / "tool.py").write_text(TOOL)
    (place / "run.json").write_text(json.dumps(CONFIG))
    (place / "start.json").write_text(json.dumps(START))


def run(place: Path, recipe: str, arguments: Sequence[str], *, out: str, unit_s: float) -> None:
    """Run a command of `rl-policy` in a directory, with a Ray of its own."""
    program = "from rl_policy.cli import main; main()"
    command = [sys.executable, "-c", program, recipe, *arguments, "--out", out]
    environment = {"RAY_ADDRESS": "local", "TOOL_UNIT_S": str(unit_s)}
    subprocess.run(command, cwd=place, env=os.environ | environment, check=True)


def measure_unit(place: Path) -> float:
    """Return the seconds of a step whose tool takes no time."""
    metrics = train(place, "without the tool", steps=6, unit_s=0.0, settings=[])
    return statistics.median(row["step_s"] for row in metrics[2:])


def measure(place: Path, way: str, number: int, steps: int, unit_s: float) -> dict[str, float]:
    """Return what a run has measured."""
    out = f"{way} {number}"
    metrics = train(place, out, steps=steps, unit_s=unit_s, settings=WAYS[way])
    trained = metrics[1:]
    stale = [row.get("staleness_max", 0.0) for row in trained]
    return {
        "steps": steps,
        "seconds": sum(row["step_s"] for row in trained),
        "accuracy": trained[-1]["accuracy"],
        "reward": statistics.mean(row["reward_mean"] for row in trained[-5:]),
        "staleness": statistics.mean(row["staleness"] for row in trained),
        "staleness_max": max(stale),
        "oldest_wait": sum(row.get("oldest_wait_s", 0.0) for row in trained),
        "rescored": trained[-1].get("rollouts_rescored", 0.0),
    }


def train(
    place: Path, out: str, *, steps: int, unit_s: float, settings: Sequence[str]
) -> list[dict[str, Any]]:
    """Train from the common start; return the metrics of each step, of step 0 first."""
    lengths = [f"grpo.steps={steps}", f"grpo.eval_every={steps}"]
    arguments = ["start/final", "--config", "run.json", *lengths, *settings]
    run(place, "grpo", arguments, out=out, unit_s=unit_s)
    lines = (place / out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what was measured, and how many times as fast each run was as the synchronous one."""
    base = {row["round"]: row["seconds"] for row in rows if row["way"] == SYNCHRONOUS}
    print(
        f"{'':16}{'steps':>6}{'seconds':>9}{'faster':>8}{'accuracy':>10}{'reward':>8}"
        f"{'staleness, most':>17}{'for the oldest':>16}{'too old':>9}"
    )
    for row in rows:
        faster = f"{base[row['round']] / row['seconds']:.1f} x" if base else ""
        stale = f"{row['staleness']:.1f}, {row['staleness_max']:.0f}"
        print(
            f"{row['way']:16}{row['steps']:6}{row['seconds']:9.0f}{faster:>8}{row['accuracy']:10.2f}"
            f"{row['reward']:8.2f}{stale:>17}{row['oldest_wait']:14.0f} s{row['rescored']:9.0f}"
        )


if __name__ == "__main__":
    main()
