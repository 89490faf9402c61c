"""The command that follows a run in progress."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
from patience import PATIENCE_S
from recipe_runs import MODULE
from report_runs import measured, write_run
from rich.console import Console
from rl_policy.report.watch import watch
from rl_policy.run.directory import RunDirectory
from rl_policy.run.environment import describe_environment, recorded_status, state_of
from rl_policy.run.metrics import MetricsLog


def running(path, *, pid=None):
    """Write that a run is in progress; return its directory."""
    status = {"state": "running", "host": socket.gethostname(), "pid": pid or os.getpid()}
    (path / "status.json").write_text(json.dumps(status))
    return RunDirectory(path)


def test_a_run_that_has_ended_is_shown_once(tmp_path):
    path, shown = write_run(tmp_path / "a", steps=2), io.StringIO()
    assert watch(path, Console(file=shown)) == "finished"
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert [line.partition("step")[0].strip() for line in lines] == ["warm-up"] * 3 + ["run"] * 3
    assert lines[-1].startswith("run step 2 reward 0.500 accuracy 0.750 loss -0.020 kl 0.500")


def test_a_terminal_gets_a_table(tmp_path):
    shown = io.StringIO()
    watch(write_run(tmp_path / "a"), Console(file=shown, force_terminal=True, width=120))
    assert "tokens/s" not in shown.getvalue()  # not measured
    assert "reward" in shown.getvalue()


@pytest.mark.parametrize(
    ("error", "state"),
    [(None, "finished"), (ValueError("x"), "failed"), (KeyboardInterrupt(), "interrupted")],
)
def test_a_run_says_how_it_ended(tmp_path, error, state):
    directory = RunDirectory(tmp_path)
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, recorded_status(directory.status):
        assert state_of(directory) == "running"
        if error is not None:
            raise error
    assert state_of(directory) == state


def test_a_run_whose_process_is_gone_was_killed(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert state_of(running(tmp_path, pid=gone.pid)) == "killed"
    status = {"state": "running", "host": "elsewhere", "pid": gone.pid}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert state_of(RunDirectory(tmp_path)) == "running"


@pytest.fixture
def follower(tmp_path):
    """Start the command on a run in progress; return its directory and process."""
    path = write_run(tmp_path / "a", steps=1)
    running(path)
    process = subprocess.Popen(
        [*MODULE, "watch", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # As under a terminal: a job in a shell's background inherits that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("run      step 1"):
        assert process.poll() is None
    yield path, process
    process.kill()
    process.communicate()


def test_a_run_is_followed_until_it_ends(follower):
    path, process = follower
    with MetricsLog(path / "metrics.jsonl") as log:
        log.write(measured(2, reward=1.0))
    assert process.stdout.readline().startswith("run      step 2  reward 1.000")
    status = json.loads((path / "status.json").read_text()) | {"state": "finished"}
    (path / "status.json").write_text(json.dumps(status))
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    assert output.strip() == f"the run {path} is finished"


@pytest.mark.slow
def test_ctrl_c_ends_the_watch_alone(follower):
    _, process = follower
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (130, "")


def test_the_environment_names_versions_and_devices():
    found = describe_environment()
    assert found["python"].startswith("3.")
    assert {"torch", "ray", "transformers", "rl-policy", "cores", "memory_gib"} <= found.keys()
    assert isinstance(found["gpus"], list)
    json.dumps(found)
