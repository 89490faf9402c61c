"""The processes of a test's programs: which are below another, and whether they have ended.

Numbers of processes are used again, for threads as well, and on a busy machine within a minute: a
process is known by when it started, too.
"""

import os
from pathlib import Path

from forked_python import fork_of


class Pid(int):
    """The number of a process that remembers when the process started, in ticks since the boot."""

    def __new__(cls, number, started):
        pid = super().__new__(cls, number)
        pid.started = started
        return pid


def descendants(pid):
    """Return the processes that a process has started or had forked, and those that they have."""
    children = {}
    for number in filter(str.isdigit, os.listdir("/proc")):
        if (fields := _fields_of(number)) is not None:
            _, parent, started = fields
            children.setdefault(parent, []).append(Pid(number, started))
    found, queue = [], [pid]
    while queue:
        parent = queue.pop()
        below = children.get(parent, [])
        if (forked := fork_of(parent)) is not None and (fields := _fields_of(forked)) is not None:
            below = [*below, Pid(forked, fields[2])]
        found += below
        queue += below
    return found


def is_gone(pid):
    """Return whether a process has ended; it may be a zombie that waits for its parent."""
    # A thread has a folder there as well, which is not listed.
    fields = _fields_of(pid) if str(int(pid)) in os.listdir("/proc") else None
    if fields is None:
        return True
    state, _, started = fields
    return state == "Z" or started != getattr(pid, "started", started)


def _fields_of(pid):
    """Return a process's state, its parent and its start; None if it has ended."""
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1]), int(fields[19])
