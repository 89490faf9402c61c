"""Which tests the repository's `conftest.py` lets a session run."""

import shutil
import subprocess
import sys

import pytest
from patience import PATIENCE_S

from checks.workspace import ROOT

TESTS = """
import pytest

@pytest.mark.gpu
def test_on_a_device(): ...

def test_fast(): ...

def test_fast_as_well(): ...

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.slow_beyond(2, every=2)
@pytest.mark.parametrize("case", range(6))
def test_cases(case): ...
"""


@pytest.fixture
def selected(tmp_path):
    """Return a function that collects two files of the same tests; it returns the first one's."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(TESTS)

    def collect(*options):
        pytest_command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *options]
        apart = ["-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
        command = [*pytest_command, *apart, str(tmp_path)]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
        )
        names = [line.split("::") for line in done.stdout.splitlines() if "::" in line]
        found = {
            file: [name.removeprefix("test_") for each, name in names if each == file]
            for file in ("test_one.py", "test_two.py")
        }
        assert found["test_one.py"] == found["test_two.py"], done.stdout + done.stderr
        return found["test_one.py"]

    return collect


def test_the_cases_beyond_some_are_slow(selected):
    found = selected("-m", "not slow and not gpu")
    assert found == ["fast", "fast_as_well", "cases[0]", "cases[2]"]


def test_a_sample_has_all_slow_tests_and_of_a_file_without_any_one_that_is_fast(selected):
    slow = ["slow", "cases[1]", "cases[3]", "cases[4]", "cases[5]"]
    assert selected("-m", "not gpu", "--sample-fast") == slow
    assert selected("-m", "not gpu and not slow", "--sample-fast") == ["fast"]
