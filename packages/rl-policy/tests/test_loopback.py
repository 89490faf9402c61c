"""The sockets on which a run of one machine listens, and all processes that it starts."""

import os
import subprocess
import time

import psutil
import pytest
from forked_python import rank_python
from patience import PATIENCE_S
from processes import descendants
from recipe_runs import MODULE

pytestmark = [pytest.mark.usefixtures("ray_apart"), pytest.mark.needs("rl-policy[dtensor]")]

RUN = [
    *(*MODULE[1:], "grpo", "--out", "run"),
    "cluster.bundle_ct_per_node_list=[2]",
    "grpo.warm_up=false",
    "grpo.steps=1000",
    "tiny_model.num_layers=1",
]
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def listening(process):
    """Return the sockets on which a process and those below it listen, TCP and UDP."""
    found = set()
    for pid in (process.pid, *descendants(process.pid)):
        try:
            each = psutil.Process(pid)
            command, sockets = " ".join(each.cmdline()), each.net_connections("inet")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        for socket in sockets:
            if socket.status == psutil.CONN_LISTEN or (socket.laddr and not socket.raddr):
                found.add((command, socket.laddr.ip, socket.laddr.port))
    return found


def sockets_of_a_run(directory):
    """Run until some steps have been taken; return all sockets that were seen."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [rank_python(), *RUN]
    run = subprocess.Popen(
        command, cwd=directory, env=environment, stderr=subprocess.PIPE, text=True
    )
    seen = set()
    metrics, deadline = directory / "run" / "metrics.jsonl", time.monotonic() + PATIENCE_S
    try:
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert run.poll() is None, run.stderr.read()
            assert time.monotonic() < deadline, "the run takes no steps"
            seen |= listening(run)
            time.sleep(0.2)
    finally:
        run.terminate()
        run.communicate(timeout=PATIENCE_S)
    return seen


@pytest.mark.slow
def test_nothing_of_a_run_can_be_reached_from_another_machine(tmp_path):
    seen = sockets_of_a_run(tmp_path)
    assert [each for each in sorted(seen) if each[1] not in LOOPBACK] == []
    # Ray's head, its node, and the store at which the ranks meet.
    for name in ("gcs_server", "raylet", "WorkerHost"):
        assert any(name in command for command, _, _ in seen), name
