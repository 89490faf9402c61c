"""Engines of several ranks that are started anew, without vLLM."""

import os
import signal
import sys
import time

import numpy as np
import pytest
import ray
from patience import PATIENCE_S
from ray.exceptions import RayActorError
from rl_policy import RayVirtualCluster, RayWorkerGroup
from rl_policy.generation.vllm import replacement
from rl_policy.generation.vllm.replacement import Replacements
from rl_policy.ray.failures import WorkerDiedError
from rl_policy.ray.sharding import NamedSharding

# Workers cannot import this module, whose class is sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


START_S = 60.0


class Rank:
    """Does not start on the rank that a file names, while there is one."""

    def __init__(self, path):
        if path.exists() and path.read_text() == os.environ["RANK"]:
            raise RuntimeError("no room")

    def process_id(self):
        return os.getpid()

    def shutdown(self):
        pass


@pytest.fixture
def broken(tmp_path):
    return tmp_path / "broken"


@pytest.fixture
def group(shared_ray, broken):
    cluster = RayVirtualCluster([4])
    sharding = NamedSharding(np.arange(4).reshape(2, 2), ["data_parallel", "tensor_parallel"])
    group = RayWorkerGroup(
        cluster, Rank, (broken,), sharding=sharding, name="ranks", ranks_stand_alone=True
    )
    yield group
    group.shutdown()
    cluster.shutdown()


def advance_until(replacements, is_done):
    deadline = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < deadline
        replacements.advance()
        time.sleep(0.05)


class HangingGroup:
    """Ranks of which those in `hanging` are constructed for ever."""

    name, has_ended, ranks_stand_alone = "ranks", False, True

    def __init__(self, num_ranks, lost, hanging):
        self.num_deaths = [int(rank in lost) for rank in range(num_ranks)]
        self.lost_ranks, self.hanging = list(lost), hanging
        self.constructed, self.ended = [], []

    def lose(self, ranks):
        assert not ranks

    def replace(self, rank):
        self.constructed.append(rank)
        return rank

    def end_lost(self, ranks):
        self.ended += ranks

    # What Ray says of a construction, which a rank stands for here.

    def wait(self, running, *, num_returns, timeout):
        assert (num_returns, timeout) == (len(running), 0)
        return [rank for rank in running if rank not in self.hanging], []

    def get(self, construction):
        return None


def test_a_start_that_hangs_is_repeated_and_then_named_with_its_processes_ended(monkeypatch):
    now = [0.0]
    group = HangingGroup(4, lost=[2, 3], hanging={3})
    monkeypatch.setattr(replacement, "ray", group)
    monkeypatch.setattr(replacement, "monotonic", lambda: now[0])
    monkeypatch.setattr(replacement, "_MOST_FAILURES", 2)
    replacements = Replacements(group, ranks_per_engine=2, start_timeout_s=START_S)
    replacements.advance()
    now[0] = START_S - 1
    replacements.advance()
    assert group.constructed == [2, 3]
    now[0] = START_S
    replacements.advance()
    assert (group.constructed, replacements.joining) == ([2, 3, 2, 3], [])
    now[0] = 2 * START_S
    with pytest.raises(TimeoutError, match=r"engine 1: ranks \[3\] of ranks .* within 60 s"):
        replacements.advance()
    assert group.ended == [2, 3]
    # It stays lost, and nothing waits for it.
    now[0] = 9 * START_S
    replacements.advance()
    assert (group.constructed, replacements.joining) == ([2, 3, 2, 3], [])


def test_a_start_in_time_takes_no_failure_from_the_limit(monkeypatch):
    now = [0.0]
    group = HangingGroup(2, lost=[1], hanging={1})
    monkeypatch.setattr(replacement, "ray", group)
    monkeypatch.setattr(replacement, "monotonic", lambda: now[0])
    replacements = Replacements(group, ranks_per_engine=1, start_timeout_s=START_S)
    replacements.advance()
    # It is looked at late, and was ready before.
    group.hanging.clear()
    now[0] = 2 * START_S
    replacements.advance()
    assert (group.constructed, replacements.joining) == ([1], [1])


class DyingGroup(HangingGroup):
    """Ranks whose process ends while it is constructed."""

    def get(self, construction):
        raise RayActorError

    def failure_of(self, rank, method, failure):
        # As a death is noted by the group.
        self.num_deaths[rank] += 1
        return WorkerDiedError(f"rank {rank} died", reason="", details=str(failure))


def test_an_engine_whose_process_ends_at_each_start_is_given_up_for_good(monkeypatch):
    group = DyingGroup(2, lost=[1], hanging=())
    monkeypatch.setattr(replacement, "ray", group)
    monkeypatch.setattr(replacement, "_MOST_FAILURES", 2)
    replacements = Replacements(group, ranks_per_engine=1, start_timeout_s=START_S)
    replacements.advance()
    with pytest.raises(WorkerDiedError, match="rank 1 died"):
        replacements.advance()
    assert (group.constructed, group.ended) == ([1, 1], [1])
    replacements.advance()
    assert (group.constructed, replacements.joining) == ([1, 1], [])


@pytest.mark.slow
def test_an_engine_comes_back_with_all_its_ranks_or_is_named_by_the_one_that_fails(
    group, broken, monkeypatch
):
    monkeypatch.setattr(replacement, "_MOST_FAILURES", 2)
    replacements = Replacements(group, ranks_per_engine=2, start_timeout_s=PATIENCE_S)
    before = group.run_all("process_id")
    os.kill(before[2], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 2 of ranks died"):
        group.run_all("process_id")
    # A start that fails is repeated.
    broken.write_text("3")
    advance_until(replacements, lambda: replacements.num_replaced == 2)
    broken.unlink()
    advance_until(replacements, lambda: replacements.joining == [1])
    assert group.ranks == [0, 1]
    assert group.run_all("process_id") == before[:2]
    replacements.restore([1])
    assert (replacements.joining, group.ranks) == ([], [0, 1, 2, 3])
    after = group.run_all("process_id")
    assert after[:2] == before[:2]
    assert set(after[2:]).isdisjoint(before)

    broken.write_text("3")
    os.kill(after[2], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        group.run_all("process_id")
    with pytest.raises(RuntimeError, match="no room") as error:
        advance_until(replacements, lambda: replacements.joining)
    assert "raised on rank 3 of ranks during __init__" in error.value.__notes__
    # The other engine is as it was.
    assert group.run_all("process_id") == before[:2]
