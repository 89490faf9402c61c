"""How a run starts its workers, and goes on by itself where they are killed, to the same end."""

import inspect
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from patience import PATIENCE_S, wait_until
from processes import descendants
from recipe_runs import TWO_RANKS, measured, write_workplace
from rl_policy import RayVirtualCluster
from rl_policy.cli import build_app
from rl_policy.config import load_run_config
from rl_policy.ray.failures import WorkerDiedError, WorkerGroupError, death_behind
from typer.testing import CliRunner

pytestmark = [pytest.mark.needs("rl-policy[dtensor]")]

RUN = ["grpo", "--config", "run.yaml", "data.path=problems.jsonl", TWO_RANKS]
STEPS = ["grpo.steps=40", "grpo.eval_every=15", "checkpoint.every=15"]
# A model that has learnt nothing has rewards that differ.
REWARD = """
def sums(completions, problems):
    return [(sum(each.encode()) % 11) / 10 for each in completions]
"""
START = ["grpo.warm_up=false", "reward.function=rewards.py:sums"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    path = write_workplace(tmp_path_factory.mktemp("restarts"))
    (path / "rewards.py").write_text(REWARD)
    return path


def num_lines(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def kill_a_rank(process, metrics, *, after):
    """Kill a rank of a run once it has taken more than `after` steps; return its processes."""

    def is_past():
        assert process.poll() is None, process.stderr.read()
        return num_lines(metrics) > after + 1

    wait_until(is_past, what="the run is past the step")
    children = descendants(process.pid)
    ranks = [pid for pid in children if b"WorkerHost" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    return children


@pytest.mark.slow
@pytest.mark.parametrize("forks", [True, False])
def test_a_command_forks_its_workers_unless_it_is_told_not_to(begin, wait_until_gone, forks):
    process = begin(*RUN, *START, "--out", f"forks-{forks}", f"cluster.fork_workers={forks}")
    found = {}

    def has_worker():
        assert process.poll() is None, process.stderr.read()
        for pid in descendants(process.pid):
            with suppress(FileNotFoundError, ProcessLookupError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(b"WorkerHost" in line for line in found.values())

    wait_until(has_worker, what="a worker")
    assert any(b"fork_client.py" in line for line in found.values()) == forks
    process.kill()
    # A plain worker that is importing sees that its node has ended when it is through.
    wait_until_gone(found)


@pytest.mark.slow
def test_a_killed_rank_comes_back_and_the_run_has_the_same_metrics(
    shared_ray, workplace, begin, wait_until_gone, monkeypatch
):
    monkeypatch.chdir(workplace)
    whole = CliRunner().invoke(build_app(), [*RUN, *START, *STEPS, "--out", "whole"])
    assert whole.exit_code == 0, whole.stderr

    metrics = workplace / "killed" / "metrics.jsonl"
    process = begin(*RUN, *START, *STEPS, "--out", "killed", "cluster.restarts=1")
    # Before the first checkpoint, from which nothing can continue.
    first = kill_a_rank(process, metrics, after=5)
    wait_until(lambda: num_lines(metrics) < 5, what="five steps")
    second = kill_a_rank(process, metrics, after=18)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, errors
    assert "died during" in errors
    assert "restart 1 of 1" in errors
    last = errors.splitlines()[-3:]
    assert last[0].startswith("error: rank ")
    assert "its process was killed" in last[0]
    assert last[1] == "all that Ray reports of it is in killed/failure.txt"
    assert last[2] == "continue with: rl-policy grpo --resume killed"
    assert "Traceback" not in errors
    assert (workplace / "killed" / "failure.txt").read_text().count("WorkerDiedError: ") == 2
    wait_until_gone([*first, *second])

    resumed = begin("grpo", "--resume", "killed", "cluster.restarts=3")
    kill_a_rank(resumed, metrics, after=32)
    output, errors = resumed.communicate(timeout=PATIENCE_S)
    assert resumed.returncode == 0, errors
    assert "restart 1 of 3" in errors
    assert ", restarts: 1)" in output
    assert measured(workplace / "killed") == measured(workplace / "whole")
    assert len({row["loss"] for row in measured(workplace / "whole")}) > 10


def test_a_death_is_found_behind_what_it_has_led_to():
    death = WorkerDiedError("rank 1 died", reason="killed", details="")

    def end():
        try:
            raise death
        finally:
            raise WorkerGroupError("the group has ended")

    with pytest.raises(WorkerGroupError) as raised:
        end()
    assert death_behind(raised.value) is death
    assert death_behind(WorkerGroupError("busy")) is None


def test_restarts_are_no_argument_of_the_cluster():
    cluster = load_run_config("grpo", overrides=["cluster.restarts=2"]).cluster
    assert cluster.restarts == 2
    assert cluster.arguments().keys() <= inspect.signature(RayVirtualCluster).parameters.keys()
    with pytest.raises(ValueError, match=r"cluster\.restarts"):
        load_run_config("grpo", overrides=["cluster.restarts=-1"])
