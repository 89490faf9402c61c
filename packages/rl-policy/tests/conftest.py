import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings
from rl_policy import backends

# Tests import the modules beside them.
sys.path.insert(0, str(Path(__file__).parent))


# No time is a fault where other work may share the processor.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


STRANGER = Path(__file__).parent / "stranger"


def pytest_collection_modifyitems(items):
    """Start with what takes longest, so that nothing is left to wait for at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="module")
def stranger_path(tmp_path_factory):
    """Put a stranger's backend, with its entry point, where this process and its workers look."""
    site = tmp_path_factory.mktemp("site")
    info = site / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rl_policy.workers]\nstranger = stranger_worker:StrangerWorker\n"
    )
    added = [str(site), str(STRANGER)]
    with pytest.MonkeyPatch.context() as patch:
        inherited = [entry for entry in [os.environ.get("PYTHONPATH")] if entry]
        patch.setenv("PYTHONPATH", os.pathsep.join(added + inherited))
        patch.setattr(sys, "path", added + sys.path)
        yield site


@pytest.fixture
def without_megatron(monkeypatch):
    """Let no installed package register the backend "megatron"."""
    found = backends.entry_points

    def others(**wanted):
        return [entry for entry in found(**wanted) if entry.name != "megatron"]

    monkeypatch.setattr(backends, "entry_points", others)


@pytest.fixture
def wait_until_gone():
    """Return a function that fails unless all processes end within a few seconds."""

    def wait(pids, limit_s=10.0):
        deadline = time.monotonic() + limit_s
        while alive := [pid for pid in pids if is_running(pid)]:
            assert time.monotonic() < deadline, f"still running: {alive}"
            time.sleep(0.05)

    return wait


def is_running(pid):
    """Return whether a process is there and is not a zombie that waits for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
