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
    """Return the fastest round: put once, read by all actors."""
    times: list[tuple[float, float, float]] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        reference = ray.put(batch)
        put = time.perf_counter()
        ray.get([actor.read.remote(reference) for actor in actors])
        end = time.perf_counter()
        times.append((end - start, put - start, end - put))
        del reference
    total, putting, reading = min(times)
    return {"batch": name, "put s": putting, "read s": reading, "round trip s": total}


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
    plain = measure(ray, actors, "dict of tensors", entries)
    ours = measure(ray, actors, "BatchedDataDict", BatchedDataDict(entries))
    ratio = plain["round trip s"] / ours["round trip s"]
    title = f"{megabytes} MiB to {ACTORS} actors: {ratio:.1f} times as fast"
    report("ray_transport", title, [plain, ours], options.out)
    ray.shutdown()
    return 0 if ratio > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
