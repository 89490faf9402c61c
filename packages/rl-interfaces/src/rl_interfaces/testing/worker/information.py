"""Rules on what a worker reports about itself, how it ends, and the errors that it raises."""

from __future__ import annotations

import gc
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from rl_interfaces.testing.expectations import expect, expect_error
from rl_interfaces.testing.report import NotApplicable, rule
from rl_interfaces.testing.worker.bench import WorkerBench
from rl_interfaces.testing.worker.oracle import LogprobLoss
from rl_interfaces.worker import CONTRACT_VERSION, PolicyWorker, check_contract_version


@rule()
def unknown_keys_are_named(bench: WorkerBench) -> None:
    """`validate_config` raises on an unknown key and names it."""
    config = {**bench.case.config, "learning_rat": 1.0}
    expect_error(
        lambda: bench.worker_class.validate_config(config, world_size=bench.ranks.world_size),
        ValueError,
        words=("learning_rat",),
        what="the key 'learning_rat'",
    )


@rule()
def sizes_that_cannot_be_are_named(bench: WorkerBench) -> None:
    """Sizes that are not positive or not divisible by the ranks raise, with the numbers."""
    worker, ranks = bench.worker, bench.layout.data_parallel
    batch = bench.share(bench.scoring)
    for name, value in (("gbs", -1), ("mbs", -2), ("gbs", 0), ("mbs", 0)):
        expect_error(
            lambda name=name, value=value: worker.train(batch, LogprobLoss(), **{name: value}),
            ValueError,
            words=(name, str(value)),
            what=f"{name}={value}",
        )
    if ranks > 1:
        expect_error(
            lambda: worker.train(batch, LogprobLoss(), gbs=ranks + 1),
            ValueError,
            words=("gbs", str(ranks + 1), str(ranks)),
            what=f"gbs={ranks + 1} over {ranks} data-parallel ranks",
        )


@rule()
def missing_keys_are_named(bench: WorkerBench) -> None:
    """A batch without a required key raises a ValueError that names the key."""
    worker = bench.worker
    for key in ("input_ids", "input_lengths", "sample_mask", "token_mask"):
        batch = bench.share(bench.scoring)
        del batch[key]
        expect_error(
            lambda batch=batch: worker.train(batch, LogprobLoss()),
            ValueError,
            words=(key,),
            what=f"a batch without {key!r}",
        )


@rule()
def left_padding_is_refused(bench: WorkerBench) -> None:
    """Left-padded rows that say so raise a ValueError; tokens alone do not say it."""
    columns = bench.columns(bench.on_every_rank([5, 3, 4, 2, 5, 3]), width=6)
    inside = torch.arange(6) < columns["input_lengths"][:, None]
    mask = {"attention_mask": inside.long()}
    left = {key: each.flip(1) for key, each in {**mask, "input_ids": columns["input_ids"]}.items()}
    bench.worker.get_logprobs(bench.share({**columns, **mask}))
    expect_error(
        lambda: bench.worker.get_logprobs(bench.share({**columns, **left})),
        ValueError,
        words=("attention_mask",),
        what="left padding",
    )


THREADS, OPEN_FILES = Path("/proc/self/task"), Path("/proc/self/fd")
NUM_WORKERS = 4
"""Consecutive workers. A leak grows with each of them."""
SETTLING_S = 5.0
"""Limit of the wait for threads and files that are being closed, in seconds."""


@rule()
def the_contracts_version_is_declared(bench: WorkerBench) -> None:
    """`contract_version` of the class is one that this version of the interfaces takes."""
    worker_class = type(bench.worker)
    check_contract_version(worker_class, owner=worker_class.__module__)
    expect(len(CONTRACT_VERSION) == 2, "a contract version is a major and a minor number")


@rule()
def every_required_method_is_there(bench: WorkerBench) -> None:
    """The worker has each method of `rl_interfaces.PolicyWorker`."""
    wanted = [name for name in dir(PolicyWorker) if not name.startswith("_")]
    missing = [name for name in wanted if not callable(getattr(bench.worker, name, None))]
    expect(wanted, "PolicyWorker has methods")
    expect(not missing, f"the worker lacks {', '.join(missing)} of rl_interfaces.PolicyWorker")


@rule()
def a_worker_says_where_it_is(bench: WorkerBench) -> None:
    """It reports that it is alive, its rank, and a stable device id."""
    worker = bench.worker
    expect(worker.is_alive() is True, "is_alive() is not True")
    rank = worker.get_gpu_info()["rank"]
    expect(rank == bench.ranks.rank, f"get_gpu_info()['rank'] is {rank} on {bench.ranks.rank}")
    device = worker.report_device_id()
    expect(isinstance(device, str) and device, f"report_device_id() is {device!r}")
    expect(device == worker.report_device_id(), "report_device_id() gives another id each time")


@rule()
def a_layout_is_of_all_ranks(bench: WorkerBench) -> None:
    """`validate_config` returns a layout of as many ranks as there are."""
    found = bench.layout.world_size
    expect(found == bench.ranks.world_size, f"{bench.layout} is of {found} ranks")


@rule()
def a_process_group_is_left_by_whoever_joined_it(bench: WorkerBench) -> None:
    """A worker uses an existing default process group, and does not destroy it at shutdown."""
    with bench.fresh(init_reference_model=False):
        pass
    text = "shutdown() has left the default process group, which the worker did not join"
    expect(dist.is_initialized(), text)


@rule()
def shutting_down_twice_is_fine(bench: WorkerBench) -> None:
    """`shutdown` may be called again."""
    with bench.fresh(init_reference_model=False) as worker:
        worker.shutdown()


@rule()
def a_worker_takes_its_threads_with_it(bench: WorkerBench) -> None:
    """Consecutive workers in one process leave no threads and no open files.

    Only a count that grows with every worker is a leak: a process starts some threads once, and the
    thread pools of some libraries grow with the first few uses.
    """
    if not THREADS.is_dir():
        raise NotApplicable(f"threads are counted in {THREADS}, which is not there")
    held = [_held_after_a_worker(bench) for _ in range(NUM_WORKERS)]
    for what in held[0]:
        counts = [each[what].total() for each in held]
        added = ", ".join(sorted((held[-1][what] - held[0][what]).elements()))
        grows = all(earlier < later for earlier, later in pairwise(counts))
        expect(not grows, f"each worker left {what} behind: {counts} of them, new are {added}")


def _held_after_a_worker(bench: WorkerBench) -> dict[str, Counter[str]]:
    """Return the threads and open files by name after one more worker has shut down.

    A joined thread remains visible for a moment, so the counts are polled until they settle.
    """
    before = _held_now()
    with bench.fresh(init_reference_model=False):
        pass
    gc.collect()
    deadline = time.monotonic() + SETTLING_S
    while True:
        now = _held_now()
        settled = all(now[what].total() <= before[what].total() for what in now)
        if settled or time.monotonic() > deadline:
            return now
        time.sleep(0.01)


def _held_now() -> dict[str, Counter[str]]:
    """Count this process's threads and open files by name."""
    held: dict[str, Counter[str]] = {"threads": Counter(), "open files": Counter()}
    for entry in THREADS.iterdir():
        # The thread has ended since it was listed.
        with suppress(FileNotFoundError, ProcessLookupError):
            held["threads"][(entry / "comm").read_text().strip()] += 1
    for entry in OPEN_FILES.iterdir():
        with suppress(FileNotFoundError):
            # Sockets and pipes are numbered, as in `socket:[4711]`.
            held["open files"][str(entry.readlink()).partition(":[")[0]] += 1
    return held
