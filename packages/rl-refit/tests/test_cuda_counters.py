"""Files in which torch counts the readers of exported GPU memory, of senders that are gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rl_refit.transports.shared_memory import remove_orphans

SHARED = Path("/dev/shm")


@pytest.fixture
def counters():
    """Make the file of a process, as torch names it."""
    made = []

    def make(pid):
        path = SHARED / f"torch_{pid}_{os.getpid()}{len(made)}_0"
        path.touch()
        made.append(path)
        return path

    yield make
    for path in made:
        path.unlink(missing_ok=True)


@pytest.fixture
def ended():
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_files_of_processes_that_have_ended_are_removed(counters, ended):
    gone, alive = counters(ended), counters(os.getpid())
    names = {f"/{path.name}" for path in (gone, alive)}
    assert remove_orphans(names) == {f"/{gone.name}"}
    assert (gone.exists(), alive.exists()) == (False, True)
    assert remove_orphans([f"/{gone.name}"]) == {f"/{gone.name}"}


def test_other_names_are_left_alone(tmp_path, ended):
    other = tmp_path / "file"
    other.touch()
    path = os.path.relpath(other, SHARED)
    names = [f"/{path}", f"/torch_{ended}_1_0/../{path}", str(other), f"/torch_{ended}_{path}"]
    assert remove_orphans(names) == set()
    assert other.exists()
