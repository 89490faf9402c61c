"""Leaks of a refit: files, open descriptors, shared memory, threads and processes."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

GONE_WITHIN_S = 300.0
"""Limit for what ends in the background, a thread for example."""

Snapshot = dict[str, list[str]]


@contextlib.contextmanager
def private_tempdir() -> Generator[Path]:
    """Redirect temporary files to a new directory in this block; yield it."""
    kept = tempfile.tempdir, os.environ.get("TMPDIR")
    # A short path, as those of Unix sockets are limited.
    directory = tempfile.mkdtemp(prefix="t-", dir="/tmp")
    tempfile.tempdir = os.environ["TMPDIR"] = directory
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory)
        tempfile.tempdir = kept[0]
        if kept[1] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = kept[1]


@contextlib.contextmanager
def nothing_left() -> Generator[Callable[[], None]]:
    """Fail if resources of the block outlive it.

    Yields a function that records the named shared memory that is mapped now, which must be gone at
    the end.
    """
    segments: set[Path] = set()
    with private_tempdir() as directory:
        before, mapped = _snapshot(directory), shared_memory(os.getpid())
        yield lambda: segments.update(shared_memory(os.getpid()) - mapped)
        end = time.monotonic() + GONE_WITHIN_S
        while (new := _additions(before, directory, segments)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not new, f"left behind: {new}"


def shared_memory(process_id: int | None) -> set[Path]:
    """Return the files of named shared memory that a process has mapped.

    Those of the CUDA driver are left out: it makes them itself, and nobody else may remove them.
    """
    maps = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
    return {
        Path(path)
        for path in paths
        if not path.endswith("(deleted)") and not Path(path).name.startswith("cuda.shm.")
    }


def _additions(before: Snapshot, directory: Path, segments: set[Path]) -> Snapshot:
    after = _snapshot(directory)
    new = {kind: [*(Counter(after[kind]) - Counter(before[kind]))] for kind in before}
    new["segments"] = sorted(str(path) for path in segments if path.exists())
    return {kind: items for kind, items in new.items() if items}


def _snapshot(directory: Path) -> Snapshot:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "files": sorted(str(path) for path in directory.rglob("*")),
        "descriptors": _descriptors(),
        "shared memory": [line for line in maps if "memfd:" in line or "/dev/shm/" in line],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "processes": [str(child.pid) for child in multiprocessing.active_children()],
    }


def _descriptors() -> list[str]:
    """Return number and kind of each open file, without the inode numbers, which always differ."""
    found: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(f"{name} {os.readlink(f'/proc/self/fd/{name}').split(':')[0]}")
    return found
