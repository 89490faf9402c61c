"""Run the main job for long, with kills and without: `python -m checks.soak [--steps 2000]`.

Two training ranks score, train, save, and hand their weights over to two vLLM engines that sample.
The job runs to its end undisturbed, and what its processes hold is measured: memory, descriptors,
threads, shared memory, object store and temporary files end where they began. It runs once more,
and every so many steps a rank, an engine or the driver is killed: its metrics are the same, and
nothing is left of it. No other program should make shared memory meanwhile: what it leaves would be
taken for the run's.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from checks.soak.levels import HEADER
from checks.soak.lives import Kill, Life

VICTIMS = ("rank 1", "engine 0", "driver", "rank 0", "engine 1")
CONFIG: dict[str, Any] = {
    "cluster": {"bundle_ct_per_node_list": [2]},
    "tiny_model": {"num_layers": 1},
    "data": {"num_heldout": 16, "num_validation": 16, "max_number": 99},
    "policy": {
        "train_global_batch_size": 16,
        "train_micro_batch_size": 8,
        "logprob_batch_size": 16,
        "optimizer": {"kwargs": {"lr": 1.0e-4}},
        "generation": {"backend": "vllm", "max_new_tokens": 4},
    },
    "sft": {"steps": 60},
    "grpo": {"prompts_per_step": 4, "samples_per_prompt": 4, "eval_every": 100},
    "checkpoint": {"keep_last": 2},
}


def main() -> int:
    """Return 1 if a level grows, or if the killed run differs or leaves something."""
    parser = argparse.ArgumentParser(prog="checks.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="of either run")
    parser.add_argument("--kill-every", type=int, default=200, help="steps between two kills")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    given = parser.parse_args()
    kills = kills_of(given.steps, every=given.kill_every)
    settings = CONFIG | {
        "cluster": CONFIG["cluster"] | {"restarts": len(kills)},
        "grpo": CONFIG["grpo"] | {"steps": given.steps},
        "checkpoint": CONFIG["checkpoint"] | {"every": given.save_every},
    }
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "run.yaml").write_text(yaml.safe_dump(settings))
        whole = life(folder, "whole").run([])
        print(f"{given.steps} steps in {whole.seconds:.0f} s\n\n{HEADER}")
        growths = whole.record.growths()
        print(*growths, "", sep="\n", flush=True)
        killed = life(folder, "killed").run(kills)
        print(f"the same with {len(kills)} kills in {killed.seconds:.0f} s:")
        print(*(f"  after step {kill.step}: {kill.victim}" for kill in kills), "", sep="\n")
    faults = [f"{growth.name} grows" for growth in growths if growth.is_excessive]
    faults += [f"left by the run without kills: {each}" for each in whole.left]
    faults += [f"left by the killed run: {each}" for each in killed.left]
    faults += differences(whole.rows, killed.rows)
    print(*(faults or ["nothing grows, nothing is left, the metrics are the same"]), sep="\n")
    return 1 if faults else 0


def life(folder: Path, name: str) -> Life:
    """Return a run of that name, below a folder that has the configuration."""
    temporary = folder / name[0]
    temporary.mkdir()
    return Life(folder / "run.yaml", folder / name, temporary)


def kills_of(steps: int, *, every: int) -> list[Kill]:
    """Return a kill for each `every` steps but the last, some steps later, always the same."""
    chance, victims = random.Random(0), itertools.cycle(VICTIMS)
    return [
        Kill(step + chance.randrange(every // 2), next(victims))
        for step in range(every, steps - every + 1, every)
    ]


def differences(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Return a line for the number of rows, or for the first row that differs."""
    if len(expected) != len(found):
        return [f"the killed run has {len(found)} rows of metrics, the other {len(expected)}"]
    for left, right in zip(expected, found, strict=True):
        names = [name for name in left.keys() | right.keys() if left.get(name) != right.get(name)]
        if names:
            values = ", ".join(
                f"{name} {left.get(name)} became {right.get(name)}" for name in sorted(names)
            )
            return [f"the killed run differs first in step {left['step']}: {values}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
