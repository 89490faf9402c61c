"""The stacks of all processes that a test has started, for the report of one that hangs.

Every Python process of a test writes its stacks to one file when it gets `_SIGNAL`: it registers
this in `sitecustomize`, which Python imports from `PYTHONPATH`. The handler is `faulthandler`'s,
so it also works in a process that waits in C or for another thread.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import tempfile
import time
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import types

    import pytest

_VARIABLE = "TEST_STACKS"
# A real-time signal, which nothing else uses. Numbers, as `signal` takes long to import.
_SIGNAL = 41
# Above the numbers that processes give to files which they take over.
_LEAST_FILE = 100
_WRITTEN_S, _POLL_S = 3.0, 0.05


def open_file() -> None:
    """Create the file of this process and of all that it starts, unless its parent has done so."""
    # Two of pytest-xdist may look for stacks at the same time.
    if _VARIABLE not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        number, path = tempfile.mkstemp(prefix="stacks-")
        os.close(number)
        os.environ[_VARIABLE] = path
        owner = os.getpid()
        atexit.register(lambda: os.getpid() == owner and Path(path).unlink(missing_ok=True))


def register() -> None:
    """Let this process, and its forks, write their stacks to the file when they get the signal."""
    if sys.platform == "linux" and _VARIABLE in os.environ:
        try:
            opened = os.open(os.environ[_VARIABLE], os.O_WRONLY | os.O_APPEND)
            file = fcntl(opened, F_DUPFD_CLOEXEC, _LEAST_FILE)
            os.close(opened)
        except OSError:
            return  # the file of a session that has ended, or too low a limit of open files
        faulthandler.register(_SIGNAL, file=file, all_threads=True)


def on_timeout(item: pytest.Item) -> None:
    """Let the report of a test that pytest-timeout ends include the stacks of its processes."""
    end = signal.getsignal(signal.SIGALRM)
    if not callable(end):
        return  # pytest-timeout has a thread instead of a signal

    def report_and_end(number: int, frame: types.FrameType | None) -> None:
        item.add_report_section("call", "stacks of the processes below", of_descendants())
        end(number, frame)

    signal.signal(signal.SIGALRM, report_and_end)


def of_descendants() -> str:
    """Return the stacks of all processes below this one; of one without Python, its command."""
    texts = []
    for pid in _descendants(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            status = dict(
                line.split(":\t", 1)
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if ":\t" in line
            )
        except OSError:
            continue
        stacks = _written_by(pid) if _listens(status) else "(it writes no Python stacks)\n"
        texts.append(f"{pid} {status['State']}: {command[:300]}\n{stacks}")
    return "\n".join(texts) or "no process is below this one"


def _listens(status: dict[str, str]) -> int:
    return int(status["SigCgt"], 16) >> (_SIGNAL - 1) & 1


def _written_by(pid: int) -> str:
    """Return what a process writes to the file; one at a time, as its lines do not name it."""
    path = Path(os.environ[_VARIABLE])
    start = size = path.stat().st_size
    try:
        os.kill(pid, _SIGNAL)
    except OSError:
        return "(it has ended)\n"
    deadline = time.monotonic() + _WRITTEN_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        before, size = size, path.stat().st_size
        if start < size == before:
            break
    return path.read_bytes()[start:].decode(errors="replace") or "(it does not answer)\n"


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        children.setdefault(int(parent), []).append(int(number))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found
