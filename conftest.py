"""What the tests of all packages have in common."""

import atexit
import os
import tempfile
from collections import Counter

import pytest

# Tensors of tests are tiny, and other tests run beside them: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """Give each process of tests a Ray of its own, as several run side by side."""
    if "RAY_TMPDIR" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        # Short, as sockets lie below it. It goes with the process.
        directory = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        os.environ["RAY_TMPDIR"] = directory.name
        atexit.register(directory.cleanup)


# Before pytest's own, which reads `-m`.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `slow_beyond` says: most cases of a test that has many of one property."""
    num_cases: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("slow_beyond")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            turn, rest = divmod(num_cases[test], mark.kwargs.get("every", 1))
            if rest or turn >= mark.args[0]:
                item.add_marker("slow")
            num_cases[test] += 1
