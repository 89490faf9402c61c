"""Measure a batch on its way to four Ray actors, against a plain dict of tensors."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any

import torch
from report import Row, parse_options, report
from rl_batched_data import BatchedDataDict

ACTORS = 4
ROUNDS = 3


class Reader:
    """Takes a batch, and looks at one number of every tensor."""

    def read(self, batch: Any) -> float:
        """Return the sum of the last numbers."""
        return sum(float(value.flatten()[-1]) for value in batch.values())


def make_entries(megabytes: int) -> dict[str, torch.Tensor]:
    """Return four matrices of that size in all."""
    rows = megabytes * 2**20 // 4 // 4 // 1024
    return {name: torch.ones(rows, 1024) for name in ("ids", "mask", "logprobs", "advantages")}


def measure(ray: Any, actors: list[Any], name: str, batch: Any) -> Row:
    """Return the times of one round: put once, read by all actors."""
    start = time.perf_counter()
    reference = ray.put(batch)
    put = time.perf_counter()
    ray.get([actor.read.remote(reference) for actor in actors])
    end = time.perf_counter()
    return {"batch": name, "put s": put - start, "read s": end - put, "round trip s": end - start}


def main() -> int:
    """Print and write the table; the exit status is 1 where the round trip is not faster."""
    options = parse_options(__doc__)
    if importlib.util.find_spec("ray") is None:
        print("skipped: ray is not installed (pip install ray)")
        return 0
    import ray

    megabytes = 64 if options.quick else 256
    ray.init(num_cpus=ACTORS, object_store_memory=2 * 2**30, include_dashboard=False)
    actors = [ray.remote(num_cpus=1)(Reader).remote() for _ in range(ACTORS)]
    entries = make_entries(megabytes)
    small = {"ids": torch.ones(1)}
    ray.get([actor.read.remote(small) for actor in actors])
    batches = {"dict of tensors": entries, "BatchedDataDict": BatchedDataDict(entries)}
    rounds = [
        [measure(ray, actors, name, batch) for name, batch in batches.items()]
        for _ in range(ROUNDS)
    ]
    plain, ours = (
        min(own, key=lambda row: row["round trip s"]) for own in zip(*rounds, strict=True)
    )
    ratio = plain["round trip s"] / ours["round trip s"]
    title = f"{megabytes} MiB to {ACTORS} actors: {ratio:.1f} times as fast"
    report("ray_transport", title, [plain, ours], options.out)
    ray.shutdown()
    return 0 if ratio > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
