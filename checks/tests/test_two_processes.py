"""Which tests run in two processes, by the root `conftest.py`."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(4))
def test_it_runs_where_it_should(number):
    assert os.environ.get("PYTEST_XDIST_WORKER") in EXPECTED
"""


def run(folder, *arguments):
    """Return the status and the output of pytest there; all that it has started has ended."""
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
        output, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        # Processes that start processes may have started others between two signals. The first of
        # the group is waited for last, so that its number is not another's.
        for _ in range(100):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=PATIENCE_S)
        raise
    return process.returncode, output


@pytest.mark.parametrize(
    ("package", "arguments", "expected"),
    [
        ("rl-policy", [], ("gw0", "gw1")),
        ("rl-refit", [], ("gw0", "gw1")),
        ("rl-refit", ["-n", "0"], (None,)),
        ("rl-refit", ["-k", "runs"], (None,)),
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
