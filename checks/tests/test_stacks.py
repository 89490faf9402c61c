"""What is reported of a test that hangs."""

import subprocess
import sys
import tomllib

from patience import PATIENCE_S

from checks.workspace import ROOT

BELOW = """
import os, time

def wait_in_a_fork(parent):
    os.write(1, b"ready\\n")
    while os.getppid() == parent:
        time.sleep(0.1)

def wait_for_it(child):
    os.write(1, b"ready\\n")
    os.waitpid(child, 0)

parent = os.getpid()
child = os.fork()
wait_for_it(child) if child else wait_in_a_fork(parent)
"""
HANGS = f"""
import signal, subprocess, sys

def test_hangs():
    command = [sys.executable, "-c", {BELOW!r}]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert [process.stdout.readline() for _ in range(2)] == ["ready\\n"] * 2
            # As pytest-timeout does when the time is over.
            signal.raise_signal(signal.SIGALRM)
        finally:
            process.kill()
"""


def test_a_test_that_hangs_is_reported_with_the_stacks_of_its_processes(tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "test_hangs.py").write_text(HANGS)
    options = ["-q", "-c", "/dev/null", "-o", "timeout=900", "--rootdir", tmp_path]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Timeout (>900.0s) from pytest-timeout" in done.stdout, done.stdout
    _, report = done.stdout.split("stacks of the processes below", 1)
    parent, fork = report.index("in wait_for_it"), report.index("in wait_in_a_fork")
    assert parent < fork < report.index("1 failed")


def test_no_wait_of_a_test_is_longer_than_pytest_allows():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["pytest"]["ini_options"]["timeout"] == PATIENCE_S
