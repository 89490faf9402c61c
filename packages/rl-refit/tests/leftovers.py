"""What a refit may leave behind: directories, open files, mapped memory, threads."""

import contextlib
import gc
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path


@contextlib.contextmanager
def private_tempdir():
    """Make temporary files in a directory of this block's own; yield it."""
    kept = tempfile.tempdir, os.environ.get("TMPDIR")
    # A short path, as those of Unix sockets are limited.
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="t-", dir="/tmp")
    try:
        yield Path(tempfile.tempdir)
    finally:
        shutil.rmtree(tempfile.tempdir)
        tempfile.tempdir = kept[0]
        if kept[1] is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = kept[1]


def snapshot(directory):
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "files": sorted(map(str, directory.iterdir())),
        "descriptors": descriptors(),
        "shared memory": [line for line in maps if "memfd:" in line or "/dev/shm/" in line],
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def descriptors():
    """What is open: the number and the kind, as the number in a name is a new one each time."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(f"{name} {os.readlink(f'/proc/self/fd/{name}').split(':')[0]}")
    return found


@contextlib.contextmanager
def nothing_left(within_s=10.0):
    """Fail if the block leaves behind what was not there before it."""
    with private_tempdir() as directory:
        before = snapshot(directory)
        yield
        end = time.monotonic() + within_s
        while (new := additions(before, snapshot(directory))) and time.monotonic() < end:
            time.sleep(0.05)
        assert not new, new


def additions(before, after):
    """What is there now and was not before."""
    new = {kind: Counter(after[kind]) - Counter(before[kind]) for kind in before}
    return {kind: dict(items) for kind, items in new.items() if items}
