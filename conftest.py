"""What the tests of all packages have in common."""

import atexit
import os
import tempfile


def pytest_configure() -> None:
    """Give each process of tests a Ray of its own, as several run side by side."""
    if "RAY_TMPDIR" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        # Short, as sockets lie below it. It goes with the process.
        directory = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        os.environ["RAY_TMPDIR"] = directory.name
        atexit.register(directory.cleanup)
