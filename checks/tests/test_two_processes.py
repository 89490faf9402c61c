"""Which tests run in two processes, by the root `conftest.py`."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(4))
def test_it_is_a_process_of_the_two(number):
    assert os.environ.get("PYTEST_XDIST_WORKER") in EXPECTED
"""


def run(folder, *arguments):
    """Return the status and the output of pytest there, which may start no more than it ends."""
    environment = {key: value for key, value in os.environ.items() if "XDIST" not in key}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=20)
    finally:
        # Whoever starts processes that start processes is ended with them all.
        for _ in range(100):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                break
        process.wait(timeout=10)
    return process.returncode, output


@pytest.mark.parametrize(
    ("package", "arguments", "expected"),
    [
        ("rl-policy", [], ("gw0", "gw1")),
        ("rl-refit", [], ("gw0", "gw1")),
        ("rl-refit", ["-n", "0"], (None,)),
        ("rl-refit", ["-k", "process"], (None,)),
        ("rl-refit", ["-p", "no:xdist"], (None,)),
        ("rl-interfaces", [], (None,)),
    ],
)
def test_packages_that_wait_run_in_two_processes(tmp_path, package, arguments, expected):
    folder = tmp_path / "packages" / package
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (folder / "test_any.py").write_text(f"EXPECTED = {expected!r}\n{TESTS}")
    status, output = run(tmp_path, f"packages/{package}", *arguments)
    assert status == 0, output
    assert "4 passed" in output
    assert ("2/2 workers" in output) == (len(expected) == 2), output
