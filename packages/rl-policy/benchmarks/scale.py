"""Measure what the driver does for a call, against ranks and rows.

A call is checked and planned, its batch goes into Ray's object store, every rank is called, and
the results are merged in the caller's order. The ranks compute nothing: they take their rows and
return as many zeros. Up to 8 they are processes of their own; beyond, all of them are one process,
and all relays are another, which is called once for each, so that all of the driver's work is real.

The driver's processor seconds are those of all its threads, Ray's too. `bare calls` are those of as
many calls without arguments and results, which is Ray's own cost of a rank; `own` is the rest. The
wall clock has more, most of it for ranks that share the processors. Exponents are fitted to the
seconds of the larger half of the sizes: 1 is linear.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
from ray.actor import ActorHandle
from report import Row, parse_options, report
from rl_batched_data import BatchedDataDict
from rl_interfaces import LossType, resolve_policy_config
from rl_policy import NamedSharding, RayVirtualCluster, RayWorkerGroup
from rl_policy.dispatch import Dispatcher, gather_scores, merge_train_results
from rl_policy.ray.relays import FAN_OUT, Relays

RUNS = 5
WIDTH = 64
# Micro-batches of a rank of which metrics come back.
MICRO_BATCHES = 4
# A step of one second may spend this share of it in the driver.
MOST_SHARE = 0.05


class IdleWorker:
    """Answers as a policy's worker does, without a model."""

    def get_logprobs(self, data: BatchedDataDict, micro_batch_size: int | None = None) -> Any:
        """Return zeros."""
        return BatchedDataDict(logprobs=torch.zeros(data["input_ids"].shape))

    def train(self, data: BatchedDataDict, **_: object) -> dict[str, Any]:
        """Return a step's loss, norm and metrics."""
        metrics = ("loss", "lr", "wd", "entropy", "kl", "num_valid_samples", "global_valid_toks")
        return {
            "global_loss": torch.zeros(1),
            "grad_norm": torch.zeros(1),
            "all_mb_metrics": {name: [0.0] * MICRO_BATCHES for name in metrics},
        }

    def nothing(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


class TokenLoss:
    """What the dispatcher asks of a loss."""

    loss_type = LossType.TOKEN_LEVEL


class OneProcessGroup(RayWorkerGroup):
    """Many ranks that are one process: the only one of `group`, whose calls are this group's."""

    def __init__(self, group: RayWorkerGroup, ranks: int, *, fan_out: int = FAN_OUT) -> None:
        vars(self).update(vars(group))
        self.sharding = NamedSharding(np.arange(ranks), ["data_parallel"])
        self._hosts = group._hosts * ranks
        self._place(group._nodes * ranks)
        if ranks > fan_out:
            self._relays = OneProcessRelays(self._hosts, self._nodes, fan_out=fan_out)
            self._relays.await_start(timeout_s=60)

    def end_relays(self) -> None:
        """End the relays alone; the ranks are those of the group."""
        if self._relays is not None:
            self._relays.kill()


class OneProcessRelays(Relays):
    """As many relays as the ranks need, all in one process."""

    def __init__(self, hosts: Sequence[ActorHandle], nodes: Sequence[str], *, fan_out: int) -> None:
        super().__init__(hosts, nodes=nodes, name="idle", lanes=[], fan_out=len(hosts))
        (every,) = self._ranks
        self._fan_out = fan_out
        self._ranks = [every[start : start + fan_out] for start in range(0, len(every), fan_out)]
        self._actors *= len(self._ranks)


def make_batch(rows: int) -> BatchedDataDict:
    """Return rows of log-normal lengths."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(rows, generator=generator) * 0.8
    lengths = (spread.exp() * WIDTH / 4).long().clamp(2, WIDTH)
    is_token = torch.arange(WIDTH) < lengths[:, None]
    ids = torch.randint(1, 1000, (rows, WIDTH), generator=generator)
    return BatchedDataDict(
        input_ids=torch.where(is_token, ids, 0),
        input_lengths=lengths,
        token_mask=(is_token & (torch.arange(WIDTH) > 0)).long(),
        sample_mask=torch.ones(rows),
    )


def policy_dispatcher(ranks: int, rows: int, batching: str) -> Dispatcher:
    """Return the dispatcher of a policy that takes one optimizer step on all rows."""
    config: dict[str, Any] = {"model_name": "any", "train_global_batch_size": rows}
    if batching != "padded":
        budget = 16 * WIDTH
        tokens = {"train_mb_tokens": budget, "logprob_mb_tokens": budget}
        config[batching] = {"enabled": True, **tokens}
    resolved = resolve_policy_config(config)  # pyright: ignore[reportArgumentType]
    return Dispatcher(resolved, data_parallel=ranks)


class Meter:
    """Wall-clock and processor seconds of this process, by part of a call."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, float]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what the context takes."""
        wall, own = time.perf_counter(), time.process_time()
        yield
        self.parts[name] = (time.perf_counter() - wall, time.process_time() - own)


def score(group: RayWorkerGroup, dispatcher: Dispatcher, batch: BatchedDataDict) -> Meter:
    """Do what `Policy.get_logprobs` does."""
    meter = Meter()
    with meter.part("plan"):
        plans, order = dispatcher.plan_scoring(batch)
    with meter.part("send"):
        call = group.submit_sharded("get_logprobs", batch, plans, micro_batch_size=None)
    with meter.part("wait"):
        parts = group.wait(call, timeout_s=300)
    with meter.part("merge"):
        gather_scores(parts, width=WIDTH, order=order)
    return meter


def train(group: RayWorkerGroup, dispatcher: Dispatcher, batch: BatchedDataDict) -> Meter:
    """Do what `Policy.train` does."""
    meter = Meter()
    with meter.part("plan"):
        plans, size = dispatcher.plan_training(batch, TokenLoss())  # pyright: ignore[reportArgumentType]
    with meter.part("send"):
        call = group.submit_sharded("train", batch, plans, gbs=size)
    with meter.part("wait"):
        parts = group.wait(call, timeout_s=300)
    with meter.part("merge"):
        merge_train_results(parts)
    return meter


def bare_calls(group: RayWorkerGroup) -> float:
    """Return the driver's processor seconds of a call of every rank, without rows."""
    meter = Meter()
    with meter.part("bare"):
        group.run_all("nothing")
    return meter.parts["bare"][1]


CALLS: Mapping[str, Callable[[RayWorkerGroup, Dispatcher, BatchedDataDict], Meter]] = {
    "score": score,
    "train": train,
}


def measure(group: RayWorkerGroup, *, rows: int, batching: str, call: str, processes: int) -> Row:
    """Return the medians of some calls, after one that does not count."""
    ranks = group.world_size
    dispatcher, batch = policy_dispatcher(ranks, rows, batching), make_batch(rows)
    meters = [CALLS[call](group, dispatcher, batch) for _ in range(RUNS + 1)][1:]

    def middle(part: str, which: int) -> float:
        return median(meter.parts[part][which] for meter in meters)

    driver = sum(middle(part, 1) for part in meters[0].parts)
    bare = median(bare_calls(group) for _ in range(RUNS))
    wall = sum(middle(part, 0) for part in meters[0].parts)
    return {
        "call": call,
        "batching": batching,
        "ranks": ranks,
        "processes": processes,
        "rows": rows,
        **{f"{part} CPU s": middle(part, 1) for part in meters[0].parts},
        "driver CPU s": driver,
        "bare calls CPU s": bare,
        "own CPU s": driver - bare,
        "wall s": wall,
        "ms per rank": 1e3 * driver / ranks,
        "us per row": 1e6 * driver / rows,
    }


def exponent(rows: Sequence[Row], size: str) -> float:
    """Return the slope of log seconds over log size, of the larger half of the sizes."""
    points = sorted((row[size], row["driver CPU s"]) for row in rows)
    points = points[len(points) // 2 - 1 :] if len(points) > 2 else points
    slope, _ = np.polyfit(*zip(*((math.log(x), math.log(y)) for x, y in points), strict=True), 1)
    return float(slope)


@contextmanager
def started(ranks: int) -> Iterator[RayWorkerGroup]:
    """Yield a group of that many processes."""
    cluster = RayVirtualCluster([ranks], use_gpus=False)
    try:
        sharding = NamedSharding(np.arange(ranks), ["data_parallel"])
        group = RayWorkerGroup(cluster, IdleWorker, sharding=sharding, name="idle")
        try:
            yield group
        finally:
            group.shutdown()
    finally:
        cluster.shutdown()


def main() -> None:
    """Print and write the tables and the exponents."""
    options = parse_options(__doc__)
    quick = options.quick
    # As a command of rl-policy does: the collector goes through what calls make alone.
    gc.freeze()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    rows: list[Row] = []
    exponents: list[Row] = []
    try:
        for ranks in (1, 2) if quick else (1, 2, 4, 8):
            with started(ranks) as group:
                rows += [
                    measure(group, rows=512, batching="padded", call=call, processes=ranks)
                    for call in CALLS
                ]
        with started(1) as only:
            per_rank = 64
            by_ranks: dict[tuple[str, str], list[Row]] = {}
            for ranks in (64, 256) if quick else (64, 256, 1024):
                group = OneProcessGroup(only, ranks)
                for batching in ("padded", "sequence_packing", "dynamic_batching"):
                    for call in CALLS:
                        row = measure(
                            group,
                            rows=per_rank * ranks,
                            batching=batching,
                            call=call,
                            processes=1,
                        )
                        by_ranks.setdefault((call, batching), []).append(row)
                group.end_relays()
            by_rows: dict[tuple[str, str], list[Row]] = {}
            group = OneProcessGroup(only, 8)
            for count in (512, 8192) if quick else (512, 8192, 131_072, 1_000_000):
                for batching in ("padded", "sequence_packing", "dynamic_batching"):
                    row = measure(group, rows=count, batching=batching, call="score", processes=1)
                    by_rows.setdefault(("score", batching), []).append(row)
    finally:
        ray.shutdown()
    for size, found in (("ranks", by_ranks), ("rows", by_rows)):
        for (call, batching), measured in found.items():
            rows += measured
            exponents.append(
                {
                    "call": call,
                    "batching": batching,
                    "against": f"{size}, 64 rows a rank" if size == "ranks" else "rows, 8 ranks",
                    "exponent": exponent(measured, size),
                    "largest": measured[-1][size],
                    "share of a step of 1 s": measured[-1]["driver CPU s"],
                    "of which bare calls": measured[-1]["bare calls CPU s"],
                    "aim": MOST_SHARE if size == "ranks" else None,
                }
            )
    report("scale", "the driver's time for a call", rows, options.out)
    report(
        "scale_exponents", f"fitted exponents, {os.cpu_count()} processors", exponents, options.out
    )


if __name__ == "__main__":
    main()
