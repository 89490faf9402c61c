"""Measure a refit into a process that copies what it gets, against plain copies and other ways.

Everything of one size is measured in turns in one run, after a first round that warms up. Figures
are medians over the rounds:

- memcpy: the same tensors copied to other memory of one process by two threads, the limit;
- copy: the same by one thread, tensor by tensor;
- shm: `RefitSender` to a `RefitReceiver` in another process, whose `load` copies every tensor;
- golden: the same through files;
- handles: a handle per tensor through a driver process, group by group, stop and wait.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rl_refit import RefitReceiver, RefitSender, TensorSource
from rl_refit.handles import HandleOwner, group_keys, rebuild

Row = dict[str, Any]
Tensors = dict[str, torch.Tensor]

SHM = {"none": "shm", "digest": "shm, verified"}


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


def copy_into(target: Tensors) -> Callable[[list[tuple[str, torch.Tensor]]], None]:
    """Return a `load` that copies every tensor to where the engine has it."""

    def load(pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            if name in target:
                target[name].copy_(tensor)
            else:
                target[name] = tensor.clone()

    return load


def serve(pipe: Connection) -> None:
    """Be the receiving process: do what the driver says until it says None."""
    torch.set_num_threads(1)
    target: Tensors = {}
    receiver = None
    version = 0
    while (order := pipe.recv()) is not None:
        kind, content = order
        if kind == "attach":
            if receiver is not None:
                receiver.close()
            receiver, version, target = RefitReceiver(content, timeout_s=120), 0, {}
        elif kind == "refit":
            assert receiver is not None
            version += 1
            receiver.begin(version)
            receiver.receive(version, copy_into(target), load_keeps=False)
            receiver.commit(version)
        elif kind == "clear":
            target = {}
        else:
            copy_into(target)([(name, rebuild(handle)) for name, handle in content.items()])
        pipe.send("done")


class Driver:
    """The process that holds the tensors, and a receiving one."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.bytes = sum(tensor.nbytes for tensor in tensors.values())
        context = mp.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,))
        self.process.start()

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

    def through_handles(self, group_bytes: int) -> None:
        """Hand every group's handles to the receiver, and wait for it."""
        specs = [(name, tensor.nbytes) for name, tensor in self.tensors.items()]
        for names in group_keys(specs, group_bytes):
            with HandleOwner() as owner:
                # One export per tensor, as each was one handle in the reference.
                handles = [owner.export({name: self.tensors[name]}) for name in names]
                merged = {name: handle for one in handles for name, handle in one.items()}
                self.tell("handles", merged)


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


def measure(tensors: Tensors, rounds: int, bucket_bytes: int | None, *, slow_ways: bool) -> Row:
    """Return the median GB/s of each way, and its median ratio to the memcpy just before it."""
    driver = Driver(tensors)
    target = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    ways: dict[str, Callable[[], None]] = {
        "memcpy": lambda: memcpy(tensors, target, 2),
        "copy": lambda: copy_all([(target[name], tensors[name]) for name in tensors]),
    }
    seconds: dict[str, list[float]] = {}
    paired: dict[str, list[float]] = {}
    turns = [("none", "shm"), ("digest", "shm")] + ([("digest", "golden")] if slow_ways else [])
    for verify, transport in turns:
        with RefitSender(
            TensorSource(tensors),
            transport,
            bucket_bytes=bucket_bytes,
            verify=verify,  # pyright: ignore[reportArgumentType]
        ) as sender:
            driver.tell("attach", sender.address)
            name = SHM[verify] if transport == "shm" else transport
            for version in range(1, rounds + 2):
                for other, way in ways.items():
                    timed(seconds, other, way)
                timed(seconds, name, lambda s=sender, v=version: driver.refit(s, v))
                if version > 1:
                    paired.setdefault(name, []).append(seconds["memcpy"][-1] / seconds[name][-1])
    if slow_ways:
        driver.tell("clear")
        for _ in range(2):
            timed(seconds, "handles", lambda: driver.through_handles(bucket_bytes or 256 << 20))
    driver.close()
    rates = {
        way: driver.bytes / statistics.median(times[1:]) / 1e9 for way, times in seconds.items()
    }
    return rates | {f"{way} / memcpy": statistics.median(own) for way, own in paired.items()}


def timed(seconds: dict[str, list[float]], name: str, way: Callable[[], None]) -> None:
    """Count the seconds of one turn."""
    start = time.perf_counter()
    way()
    seconds.setdefault(name, []).append(time.perf_counter() - start)


def show(title: str, rows: list[Row], out: Path, name: str) -> None:
    """Print a table and write it as JSON with the machine's facts."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([text(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processors": os.cpu_count(),
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps({"title": title, "machine": facts, "rows": rows}, indent=2))
    print(f"written to {path}")


def text(value: Any) -> str:
    """Return a cell."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--quick", action="store_true", help="100 MB alone")
    parser.add_argument("--large", action="store_true", help="4 GB as well")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mb", type=float, default=0, help="0: the default of the package")
    return parser.parse_args()


def main() -> int:
    """Print and write the tables; the exit status is 1 where a goal is missed."""
    options = parse_options()
    torch.set_num_threads(1)
    bucket_bytes = int(options.bucket_mb * 1e6) or None
    sizes = [100] if options.quick else [100, 300, 1000] + ([4000] if options.large else [])
    rows = []
    for megabytes in sizes:
        row = measure(make_tensors(megabytes), options.rounds, bucket_bytes, slow_ways=True)
        rows.append({"MB": megabytes, **row, "shm / handles": row["shm"] / row["handles"]})
    show("GB/s of float32 layers, and ratios side by side", rows, options.out, "stream")
    if not options.quick:
        shapes = []
        for count, kilobytes in [(1, 1_000_000), (10_000, 100)]:
            tensors = make_equal(count, kilobytes)
            row = measure(tensors, options.rounds, bucket_bytes, slow_ways=False)
            shapes.append({"tensors": count, "kB each": kilobytes, **row})
        show("GB/s of one tensor and of many", shapes, options.out, "stream_shapes")
    worst = [min(row[f"{name} / memcpy"] for row in rows) for name in SHM.values()]
    print(f"worst of memcpy: {worst[0]:.2f} unverified, {worst[1]:.2f} verified")
    return 0 if worst[0] >= 0.5 and worst[1] >= 0.33 else 1


if __name__ == "__main__":
    sys.exit(main())
