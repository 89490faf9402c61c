"""Three ranks behind two relays, where `test_worker_group` has a relay for each rank."""

import os
import signal

import numpy as np
import pytest
import ray
from patience import PATIENCE_S
from rl_batched_data import BatchedDataDict
from rl_policy import NamedSharding, RayVirtualCluster, RayWorkerGroup
from rl_policy.ray.failures import WorkerDiedError, WorkerGroupError

RANKS = 3


@pytest.fixture(scope="module")
def cluster(shared_ray, stranger_path):
    cluster = RayVirtualCluster([RANKS], use_gpus=False)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def group(cluster, wait_until_gone):
    """A group whose relays end with it; its ranks are kept for the next."""
    from probe_worker import ProbeWorker

    sharding = NamedSharding(np.arange(RANKS), ["data_parallel"])
    group = RayWorkerGroup(
        cluster, ProbeWorker, sharding=sharding, name="probe", fan_out=2, takes_calls_beside=True
    )
    relays = relay_pids(group)
    assert len(relays) == 2
    yield group
    with cluster.spare_hosts.keeping():
        group.shutdown()
    wait_until_gone(relays)


def relay_pids(group):
    return [
        ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=PATIENCE_S)
        for actor in group._relays._actors
    ]


def test_results_are_in_rank_order_by_every_kind_of_call(group):
    assert [answer["RANK"] for answer in group.run_all("describe")] == ["0", "1", "2"]
    batch = BatchedDataDict(word=["a", "b", "c"])
    results = group.run_sharded("echo", batch, batch.plan_by_batch_size(RANKS), suffix="!")
    assert results == [(rank, [word], "!") for rank, word in enumerate("abc")]
    assert ray.get(group.start_all("all_reduce", value=1.0), timeout=PATIENCE_S) == [6.0] * RANKS
    assert all(size > 2**20 for size in group.peak_memory())


def test_a_call_beside_does_not_wait_for_the_one_that_runs(group):
    running = group.submit_all("sleep", 3600)
    answers = group.wait(group.submit_beside("describe"), timeout_s=PATIENCE_S)
    assert [answer["RANK"] for answer in answers] == ["0", "1", "2"]
    # On ranks of the second relay alone, and of both.
    for ranks in ([2], [1, 2]):
        call = group.submit_beside_on(ranks, "describe")
        assert [int(answer["RANK"]) for answer in group.wait(call, timeout_s=PATIENCE_S)] == ranks
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1, 2\] of probe did not finish sleep"):
        group.wait(running, timeout_s=0.1)


@pytest.mark.parametrize("busy", [[1], [0, 2]])
def test_a_limit_names_the_ranks_that_are_busy_and_no_other(group, busy):
    call = group.submit_all("sleep", 3600, ranks=busy)
    with pytest.raises(TimeoutError, match=rf"ranks \[{str(busy)[1:-1]}\] of probe did not finish"):
        group.wait(call, timeout_s=1.0)
    with pytest.raises(WorkerGroupError, match="has ended"):
        group.run_all("describe")


def test_a_failure_behind_one_relay_ends_the_wait_for_the_other(group):
    """The others have their grace, and are killed after it: they wait for a peer that has left."""
    with pytest.raises(ValueError, match="rank 2 does not like this") as raised:
        group.run_all("fail", ranks=[2], then_reduce=True)
    assert raised.value.__notes__ == ["raised on rank 2 of probe during fail"]
    with pytest.raises(WorkerGroupError, match="rank 2 does not like this"):
        group.run_all("describe")


def test_failures_behind_both_relays_are_told_together(group):
    with pytest.raises(ValueError, match="rank 1 does not like this") as raised:
        group.run_all("fail", ranks=[1, 2])
    assert raised.value.__notes__[1] == "ranks [2] failed as well"
    assert group.run_all("all_reduce") == [3.0] * RANKS


def test_a_call_that_fails_before_another_that_was_started_is_told(group):
    first = group.submit_all("fail", ranks=[1])
    second = group.submit_all("all_reduce")
    assert group.wait(second) == [3.0] * RANKS
    with pytest.raises(ValueError, match="rank 1 does not like this"):
        group.wait(first)


def test_a_limit_on_a_call_that_waits_for_another_is_kept(group):
    group.submit_all("sleep", 3600, ranks=[2])
    second = group.submit_all("describe")
    with pytest.raises(TimeoutError, match=r"ranks \[2\] of probe did not finish describe"):
        group.wait(second, timeout_s=1.0)


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_relay_that_dies_is_named_and_ends_the_group(group, is_busy, wait_until_gone):
    ranks = [answer["pid"] for answer in group.run_all("describe")]
    relay = relay_pids(group)[1]
    call = group.submit_all("sleep", 3600) if is_busy else None
    os.kill(relay, signal.SIGKILL)
    if not is_busy:
        wait_until_gone([relay])
        call = group.submit_all("describe")
    with pytest.raises(WorkerDiedError, match="the relay of ranks 2 to 2") as raised:
        group.wait(call)
    assert raised.value.summary.startswith("rank 2 of probe died")
    with pytest.raises(WorkerGroupError, match="has ended"):
        group.run_all("describe")
    wait_until_gone(ranks)
