import signal
import subprocess

import pytest
from forked_python import fork_of, forking_python
from patience import PATIENCE_S
from processes import descendants

_WAITS = "import time\nprint('ready', flush=True)\ntime.sleep(60)\n"


@pytest.fixture
def begin_waiting(tmp_path):
    """Return a function that starts a script that waits; what it started ends with the test."""
    script = tmp_path / "waits.py"
    script.write_text(_WAITS)
    started = []

    def begin(python):
        process = subprocess.Popen(
            [python, str(script)],
            stdout=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def test_forks_end_with_the_python_that_forks_them(begin_waiting, wait_until_gone):
    with forking_python([]) as python:
        process = begin_waiting(python)
        below = descendants(process.pid)
        assert fork_of(process.pid) in below
    assert process.wait(timeout=PATIENCE_S) == 1
    wait_until_gone(below)


def test_ctrl_c_ends_a_fork_though_it_is_ignored_where_the_forks_are_made(begin_waiting):
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with forking_python([]) as python:
            process = begin_waiting(python)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=PATIENCE_S) == -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, handler)
