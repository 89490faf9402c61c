"""What the tests of all packages have in common."""

import atexit
import os
import tempfile


def pytest_configure() -> None:
    """Give tests that run side by side a Ray of their own each, where they start one."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Short, as sockets lie below it. It goes with the process.
        directory = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        os.environ["RAY_TMPDIR"] = directory.name
        atexit.register(directory.cleanup)
