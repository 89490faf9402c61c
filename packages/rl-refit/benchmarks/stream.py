"""Measure a refit into a process that copies what it gets, against plain copies and other ways.

Everything of one size is measured in turns in one run, after a first round that warms up. Figures
are medians over the rounds, and ratios those of neighbours in time:

- memcpy: the same tensors copied to other memory of one process by two threads, the limit;
- copy: the same by one thread, tensor by tensor;
- into: `RefitSender` to a `RefitReceiver` in another process that has a place for every tensor;
- load: the same, with a `load` that is given full tensors and copies them;
- golden: `load` through files;
- handles: a handle per tensor through a driver process, group by group, stop and wait.

With `--device cuda` the tensors of both processes are on that GPU, `cuda_ipc` takes the place of
shared memory, and `memcpy` and `copy` are copies within the GPU.

The extra MB are what the two processes of `into` take at most beyond what they had before: the two
buffers, which they share, and what Python and torch keep per tensor. GPU memory is not in them.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from report import Row, report
from rl_refit import RefitReceiver, RefitSender, TensorSource
from rl_refit.compat.handles import HandleOwner, group_keys, rebuild
from rl_refit.plan import SMALL_BUCKET_BYTES

Tensors = dict[str, torch.Tensor]

GROUP_BYTES = 256 << 20
MOST_PLACES_BYTES = 1 << 30
GOALS = {"into / memcpy": 0.5, "into, verified / memcpy": 0.33}


def make_tensors(megabytes: float) -> Tensors:
    """Return a model of that size in float32: layers of 7 matrices and 2 vectors, and an end."""
    width = 1024
    layer = 4 * width * width + 3 * width * 4 * width + 2 * width
    layers = max(1, round(megabytes * 1e6 / 4 / layer))
    tensors: Tensors = {}
    for index in range(layers):
        for name in ("q", "k", "v", "o"):
            tensors[f"model.layers.{index}.{name}.weight"] = torch.randn(width, width)
        for name in ("gate", "up", "down"):
            tensors[f"model.layers.{index}.{name}.weight"] = torch.randn(4 * width, width)
        for name in ("norm1", "norm2"):
            tensors[f"model.layers.{index}.{name}.weight"] = torch.randn(width)
    return tensors


def make_equal(count: int, kilobytes: int) -> Tensors:
    """Return `count` tensors of that size."""
    return {f"layers.{i // 10}.w{i}": torch.randn(kilobytes * 250) for i in range(count)}


def on(device: torch.device, tensors: Tensors) -> Tensors:
    """Return the tensors on a device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def copy_into(target: Tensors) -> Callable[[list[tuple[str, torch.Tensor]]], None]:
    """Return a `load` that copies every tensor to where the engine has it."""

    def load(pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            target[name].copy_(tensor)

    return load


def serve(pipe: Connection, shapes: dict[str, torch.Size], device: torch.device) -> None:
    """Be the receiving process: do what the driver says until it says None."""
    torch.set_num_threads(1)
    # Not zeros, which take no memory until they are written.
    target = {name: torch.ones(shape, device=device) for name, shape in shapes.items()}
    receiver = None
    version = 0
    while (order := pipe.recv()) is not None:
        kind, content = order
        if kind in ("into", "load"):
            if receiver is not None:
                receiver.close()
            into = target if kind == "into" else None
            receiver = RefitReceiver(content, timeout_s=120, device=device, into=into)
            version = 0
        elif kind == "refit":
            assert receiver is not None
            version += 1
            receiver.begin(version)
            receiver.receive(version, copy_into(target), load_keeps=False)
            receiver.commit(version)
        else:
            rebuilt = [(name, rebuild(handle, device)) for name, handle in content.items()]
            copy_into(target)(rebuilt)
            del rebuilt
        finish(device)
        pipe.send("done")


def finish(device: torch.device) -> None:
    """Wait for what a GPU has yet to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Driver:
    """The process that holds the tensors, and a receiving one."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.device = next(iter(tensors.values())).device
        context = mp.get_context("spawn")
        self.pipe, other = context.Pipe()
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.process = context.Process(target=serve, args=(other, shapes, self.device))
        self.process.start()
        assert self.process.pid is not None
        self.pids = (os.getpid(), self.process.pid)

    def tell(self, kind: str, content: Any = None) -> None:
        """Give an order and wait until it is done."""
        self.pipe.send((kind, content))
        self.pipe.recv()

    def close(self) -> None:
        """End the receiving process."""
        self.pipe.send(None)
        self.process.join()

    def refit(self, sender: RefitSender, version: int) -> None:
        """Send a version and wait until the receiver has committed it."""
        self.pipe.send(("refit", None))
        sender.send(version)
        self.pipe.recv()

    def timed(self, way: Callable[[], None]) -> float:
        """Return the seconds of one turn."""
        finish(self.device)
        start = time.perf_counter()
        way()
        finish(self.device)
        return time.perf_counter() - start

    def through_handles(self) -> None:
        """Hand every group's handles to the receiver, and wait for it."""
        specs = [(name, tensor.nbytes) for name, tensor in self.tensors.items()]
        for names in group_keys(specs, GROUP_BYTES):
            with HandleOwner() as owner:
                # One export per tensor, as each was one handle in the reference.
                handles = [owner.export({name: self.tensors[name]}) for name in names]
                merged = {name: handle for one in handles for name, handle in one.items()}
                self.tell("handles", merged)


def extra_megabytes(pids: tuple[int, ...], way: Callable[[], None]) -> list[float]:
    """Return how far the resident memory of processes rises at most while `way` runs."""
    before = [resident_bytes(pid, "VmRSS") for pid in pids]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # Begin the peak anew.
    way()
    peaks = [resident_bytes(pid, "VmHWM") for pid in pids]
    return [(peak - start) / 1e6 for peak, start in zip(peaks, before, strict=True)]


def resident_bytes(pid: int, kind: str) -> int:
    """Return what the kernel says of a process's resident memory, as `VmRSS` or `VmHWM`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{kind}:")]
    return int(line.split()[1]) * 1024


def make_places(tensors: Tensors) -> Tensors:
    """Return memory to copy each tensor to: more than a cache holds, and no second model."""
    total = sum(tensor.numel() for tensor in tensors.values())
    largest = max(tensor.numel() for tensor in tensors.values())
    device = next(iter(tensors.values())).device
    memory = torch.ones(max(largest, min(total, MOST_PLACES_BYTES // 4)), device=device)
    places: Tensors = {}
    start = 0
    for name, tensor in tensors.items():
        if start + tensor.numel() > len(memory):
            start = 0
        places[name] = memory[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    return places


def memcpy(tensors: Tensors, target: Tensors, num_threads: int) -> None:
    """Copy tensors to the target, shared out among threads."""
    names = list(tensors)
    total = sum(tensor.nbytes for tensor in tensors.values())
    share, shares, used = [], [], 0
    for name in names:
        tensor = tensors[name].view(-1)
        place = target[name].view(-1)
        # Cut where a thread's share ends.
        while len(tensor):
            left = total * (len(shares) + 1) // num_threads - used
            size = max(1, min(len(tensor), left // 4))
            share.append((place[:size], tensor[:size]))
            tensor, place, used = tensor[size:], place[size:], used + size * 4
            if used * num_threads >= total * (len(shares) + 1):
                shares.append(share)
                share = []
    threads = [threading.Thread(target=copy_all, args=(part,)) for part in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each pair's second tensor to its first."""
    for place, tensor in pairs:
        place.copy_(tensor)


def measure(tensors: Tensors, rounds: int, bucket_bytes: int, *, slow_ways: bool) -> Row:
    """Return the median GB/s of each way, and median ratios to the copies just before it."""
    driver = Driver(tensors)
    target = make_places(tensors)
    near = "cuda_ipc" if driver.device.type == "cuda" else "shm"
    limits: dict[str, Callable[[], None]] = {
        "memcpy": lambda: memcpy(tensors, target, 2),
        "copy": lambda: copy_all([(target[name], tensors[name]) for name in tensors]),
    }
    turns = {
        "into": ("into", near, "none", bucket_bytes),
        "into, verified": ("into", near, "digest", bucket_bytes),
        "load": ("load", near, "none", None),
        "load, verified": ("load", near, "digest", None),
    }
    if slow_ways:
        turns["golden"] = ("load", "golden", "digest", None)
    seconds: dict[str, list[float]] = {}
    extra: dict[str, list[float]] = {}
    for name, (kind, transport, verify, size) in turns.items():
        with RefitSender(
            TensorSource(tensors),
            transport,
            bucket_bytes=size,
            device=driver.device,
            verify=verify,  # pyright: ignore[reportArgumentType]
        ) as sender:
            driver.tell(kind, sender.address)
            extra[name] = extra_megabytes(driver.pids, lambda s=sender: driver.refit(s, 1))
            for version in range(2, rounds + 2):
                for limit, way in limits.items():
                    seconds.setdefault(f"{limit} beside {name}", []).append(driver.timed(way))
                own = driver.timed(lambda s=sender, v=version: driver.refit(s, v))
                seconds.setdefault(name, []).append(own)
    if slow_ways:
        driver.through_handles()
        seconds["handles"] = [driver.timed(driver.through_handles)]
    driver.close()
    row = summarise(driver.bytes, seconds, list(turns))
    row["sender's extra MB"], row["receiver's extra MB"] = extra["into"]
    return row


def summarise(num_bytes: int, seconds: dict[str, list[float]], names: list[str]) -> Row:
    """Return rates, and the ratios of neighbours in time."""
    row: Row = {}
    for limit in ("memcpy", "copy"):
        times = [time for name in names for time in seconds[f"{limit} beside {name}"]]
        row[limit] = num_bytes / statistics.median(times) / 1e9
    for name in [*names, *(["handles"] if "handles" in seconds else [])]:
        row[name] = num_bytes / statistics.median(seconds[name]) / 1e9
    for name in names:
        if name == "golden":
            continue
        for limit in ("memcpy", "copy"):
            pairs = zip(seconds[f"{limit} beside {name}"], seconds[name], strict=True)
            row[f"{name} / {limit}"] = statistics.median(base / own for base, own in pairs)
    if "handles" in row:
        row["into, verified / handles"] = row["into, verified"] / row["handles"]
    return row


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--quick", action="store_true", help="100 MB alone")
    parser.add_argument("--large", action="store_true", help="4 GB as well")
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mb", type=float, default=SMALL_BUCKET_BYTES / 2**20)
    return parser.parse_args()


def main() -> int:
    """Print and write the tables; the exit status is 1 where a goal is missed."""
    options = parse_options()
    torch.set_num_threads(1)
    bucket_bytes = int(options.bucket_mb * 2**20)
    sizes = [100] if options.quick else [100, 300, 1000] + ([4000] if options.large else [])
    rows: list[Row] = []
    for megabytes in sizes:
        slow_ways = megabytes <= 1000
        tensors = on(options.device, make_tensors(megabytes))
        row = measure(tensors, options.rounds, bucket_bytes, slow_ways=slow_ways)
        rows.append({"MB": megabytes, **row})
    report("stream", "GB/s of float32 layers, and ratios side by side", rows, options.out)
    if not options.quick:
        shapes: list[Row] = []
        for count, kilobytes in [(1, 1_000_000), (10_000, 100)]:
            tensors = on(options.device, make_equal(count, kilobytes))
            row = measure(tensors, options.rounds, bucket_bytes, slow_ways=False)
            shapes.append({"tensors": count, "kB each": kilobytes, **row})
        report("stream_shapes", "GB/s of one tensor and of many", shapes, options.out)
    if options.large:
        rates = {row["MB"]: row["into"] for row in rows}
        linear = ", ".join(f"{mb} MB {rates[4000] / rates[mb]:.2f}" for mb in sizes[:-1])
        print("GB/s at 4000 MB over that at", linear)
    worst = {name: min(row[name] for row in rows) for name in GOALS}
    print("worst:", ", ".join(f"{name} {value:.2f}" for name, value in worst.items()))
    return 0 if all(worst[name] >= goal for name, goal in GOALS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
