import os
import signal
import threading

import numpy as np
import pytest
import ray
from patience import PATIENCE_S
from rl_batched_data import BatchedDataDict
from rl_policy import NamedSharding, RayVirtualCluster, RayWorkerGroup
from rl_policy.ray.failures import WorkerDiedError, WorkerGroupError
from rl_policy.ray.relays import FAN_OUT

# The limit that is promised to a user for a worker that dies.


@pytest.fixture(scope="module")
def cluster(shared_ray, stranger_path):
    cluster = RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def probe(stranger_path):
    import probe_worker

    return probe_worker


# A relay for each of two ranks is seen from the driver as none is.
@pytest.fixture(scope="module", params=[FAN_OUT, 1], ids=["direct", "relayed"])
def fan_out(request):
    return request.param


@pytest.fixture(scope="module")
def shared_group(cluster, probe, fan_out):
    """A group for the tests after which it is still usable."""
    group = start(cluster, probe.ProbeWorker, fan_out=fan_out)
    yield group
    group.shutdown()


@pytest.fixture
def group(cluster, probe, fan_out):
    """A group for a test that breaks it."""
    group = start(cluster, probe.ProbeWorker, fan_out=fan_out)
    yield group
    group.shutdown()


def start(cluster, worker_class, *, tensor_parallel=1, **kwargs):
    layout = np.arange(2).reshape(-1, tensor_parallel)
    sharding = NamedSharding(layout, ["data_parallel", "tensor_parallel"])
    return RayWorkerGroup(cluster, worker_class, sharding=sharding, name="probe", **kwargs)


def end_for_another(cluster, group):
    """End a group that is intact, and keep its processes for the one that starts next."""
    with cluster.spare_hosts.keeping():
        assert group.shutdown()


def words(*texts):
    """Return a batch of a word per row, and plans of a row each."""
    batch = BatchedDataDict(word=list(texts))
    return batch, batch.plan_by_batch_size(len(texts))


def environments(group, name):
    return [answer[name] for answer in group.run_all("describe")]


def pids_of(group):
    return environments(group, "pid")


def test_every_rank_gets_torchruns_environment(shared_group):
    answers = shared_group.run_all("describe")
    assert [answer["RANK"] for answer in answers] == ["0", "1"]
    assert [answer["LOCAL_RANK"] for answer in answers] == ["0", "1"]
    assert {answer["WORLD_SIZE"] for answer in answers} == {"2"}
    assert {answer["LOCAL_WORLD_SIZE"] for answer in answers} == {"2"}
    assert len({(answer["MASTER_ADDR"], answer["MASTER_PORT"]) for answer in answers}) == 1
    assert {answer["CUDA_VISIBLE_DEVICES"] for answer in answers} == {""}
    assert len({answer["pid"] for answer in answers} | {os.getpid()}) == 3


@pytest.mark.slow
def test_a_rank_computes_with_its_share_of_the_cores(cluster, probe, shared_group):
    """Ray has set it to 1 before torch was imported, which reads it then."""
    cores = len(os.sched_getaffinity(0))
    answers = shared_group.run_all("describe")
    assert [answer["num_threads"] for answer in answers] == [max(1, cores // 2)] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "3,1")  # the user's own
        group = start(cluster, probe.ProbeWorker)
    try:
        assert [answer["num_threads"] for answer in group.run_all("describe")] == [3, 3]
    finally:
        group.shutdown()


@pytest.mark.promise
def test_ranks_work_together(shared_group):
    assert shared_group.run_all("all_reduce", value=10.0) == [21.0, 21.0]


def test_each_coordinate_gets_its_shard(shared_group):
    results = shared_group.run_sharded("echo", *words("first", "second"), suffix="!")
    assert results == [(0, ["first"], "!"), (1, ["second"], "!")]


def test_ranks_of_one_coordinate_share_a_shard_and_the_first_answers(cluster, probe):
    group = start(cluster, probe.ProbeWorker, tensor_parallel=2)
    try:
        call = group.submit_sharded("echo", *words("only"))
        assert group.wait(call) == [(0, ["only"], "")]
        # The second tensor-parallel rank ran too, and sent no copy of the result.
        assert ray.get(call.refs[1], timeout=PATIENCE_S) is None
        assert group.run_all("all_reduce") == [1.0, 1.0]
    finally:
        end_for_another(cluster, group)


def test_a_wrong_number_of_shards_is_refused(shared_group):
    with pytest.raises(ValueError, match="1 shards do not fit data_parallel=2"):
        shared_group.run_sharded("echo", *words("only"))


def test_arguments_of_the_constructor_reach_every_rank(cluster, probe):
    group = start(cluster, probe.ProbeWorker, worker_kwargs={"greeting": "hi"})
    try:
        assert [answer["greeting"] for answer in group.run_all("describe")] == ["hi", "hi"]
    finally:
        end_for_another(cluster, group)


@pytest.mark.promise
def test_an_exception_keeps_its_type_and_its_traceback(shared_group):
    with pytest.raises(ValueError, match="rank 0 does not like this") as raised:
        shared_group.run_all("fail", ranks=[0, 1])
    assert type(raised.value) is ValueError
    assert 'probe_worker.py", line' in str(raised.value.__cause__)
    assert "\x1b[" not in str(raised.value.__cause__)
    assert raised.value.__notes__ == [
        "raised on rank 0 of probe during fail",
        "ranks [1] failed as well",
    ]


def test_a_group_whose_ranks_are_idle_again_stays_usable(shared_group):
    with pytest.raises(ValueError, match="rank 1 does not like this"):
        shared_group.run_all("fail", ranks=[1])
    assert shared_group.run_all("all_reduce") == [1.0, 1.0]


def test_a_rank_has_some_time_to_finish_after_another_has_failed(shared_group):
    with pytest.raises(ValueError, match="rank 1 does not like this"):
        shared_group.run_all("fail", ranks=[1], others_take_s=1.0)
    assert shared_group.run_all("all_reduce") == [1.0, 1.0]


@pytest.mark.parametrize(
    ("method", "message"),
    [("fail_unpicklable", "this and that"), ("fail_with_lambda", "holds a lambda")],
)
def test_an_exception_that_cannot_be_pickled_keeps_its_text(shared_group, method, message):
    with pytest.raises(Exception, match=message):
        shared_group.run_all(method)
    assert shared_group.run_all("all_reduce") == [1.0, 1.0]


def test_an_argument_that_cannot_be_pickled_leaves_the_group_usable(shared_group):
    with pytest.raises(TypeError, match="lock"):
        shared_group.run_all("echo", threading.Lock())
    assert shared_group.run_all("all_reduce") == [1.0, 1.0]


def test_an_argument_that_cannot_be_unpickled_leaves_the_group_usable(shared_group, probe):
    with pytest.raises(WorkerGroupError, match="this cannot be read"):
        shared_group.run_all("echo", probe.Unreadable())
    assert shared_group.run_all("all_reduce") == [1.0, 1.0]


def test_a_rank_that_raises_while_the_other_waits_ends_the_group(group, wait_until_gone):
    pids = pids_of(group)
    with pytest.raises(ValueError, match="rank 1 does not like this"):
        group.run_all("fail", ranks=[1], then_reduce=True)
    with pytest.raises(WorkerGroupError, match="rank 1 does not like this"):
        group.run_all("describe")
    wait_until_gone(pids)
    assert group.shutdown() is False


def test_a_rank_that_dies_in_a_collective_is_named_in_time(group, wait_until_gone):
    pids = pids_of(group)
    group.run_all("all_reduce")
    with pytest.raises(WorkerDiedError, match="rank 1 of probe died during die"):
        group.run_all("die", ranks=[1])
    wait_until_gone(pids)
    with pytest.raises(WorkerGroupError, match="rank 1 of probe died"):
        group.run_all("describe")


def test_a_rank_that_is_killed_while_the_other_is_busy_is_named_in_time(group, wait_until_gone):
    pids = pids_of(group)
    call = group.submit_all("sleep", 3600)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 0 of probe died during sleep"):
        group.wait(call)
    wait_until_gone(pids)


@pytest.mark.promise
def test_a_rank_that_was_killed_between_calls_is_named(group, wait_until_gone):
    pids = pids_of(group)
    os.kill(pids[1], signal.SIGKILL)
    wait_until_gone(pids[1:])
    with pytest.raises(WorkerDiedError, match="rank 1 of probe died during all_reduce"):
        group.run_all("all_reduce")
    wait_until_gone(pids)


def test_calls_that_a_replaced_process_leaves_behind_are_no_deaths(cluster, probe):
    """The processes of an engine end together: one that lives is killed for the other."""
    group = start(cluster, probe.ProbeWorker, ranks_stand_alone=True)
    try:
        left_behind = group.submit_all("sleep", 3600, ranks=[1])
        group.lose([1])
        started = group.replace(1)
        with pytest.raises(WorkerDiedError, match="rank 1 of probe died during sleep"):
            group.wait(left_behind)
        ray.get(started, timeout=PATIENCE_S)
        group.restore([1])
        assert (group.num_deaths, group.ranks) == ([0, 1], [0, 1])
        assert len(group.run_all("describe")) == 2
    finally:
        end_for_another(cluster, group)


def test_a_constructor_that_raises_leaves_nothing(cluster, probe, tmp_path, wait_until_gone):
    kwargs = {"pid_dir": str(tmp_path), "fail_on_rank": 1}
    with pytest.raises(KeyError, match="no such model") as raised:
        start(cluster, probe.ProbeWorker, worker_kwargs=kwargs)
    assert 'probe_worker.py", line' in str(raised.value.__cause__)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_start_that_hangs_is_ended(cluster, probe, tmp_path, wait_until_gone):
    kwargs = {"pid_dir": str(tmp_path), "hang_on_rank": 0}
    # The other rank has to start within this, also on a busy machine.
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of probe did not finish __init__"):
        start(cluster, probe.ProbeWorker, worker_kwargs=kwargs, start_timeout_s=15)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    wait_until_gone(pids)


@pytest.mark.slow
def test_two_groups_share_a_cluster(cluster, probe, shared_group):
    second = start(cluster, probe.ProbeWorker)
    try:
        calls = [shared_group.submit_all("all_reduce"), second.submit_all("all_reduce", value=1.0)]
        assert shared_group.wait(calls[0]) == [1.0, 1.0]
        assert second.wait(calls[1]) == [3.0, 3.0]
        assert not set(pids_of(second)) & set(pids_of(shared_group))
    finally:
        second.shutdown()


def test_shutdown_ends_every_process_and_may_be_repeated(group, wait_until_gone):
    pids = pids_of(group)
    assert group.shutdown() is True
    wait_until_gone(pids)
    assert group.shutdown() is True
    with pytest.raises(WorkerGroupError, match="probe has ended: it was shut down"):
        group.run_all("describe")


@pytest.mark.slow
def test_shutdown_ends_a_rank_that_is_busy(group, wait_until_gone):
    pids = pids_of(group)
    group.submit_all("sleep", 3600, ranks=[1])
    assert group.shutdown(timeout_s=1.0) is False
    wait_until_gone(pids)


@pytest.mark.slow
def test_shutdown_reports_a_worker_that_will_not_leave(cluster, probe, wait_until_gone, caplog):
    group = start(cluster, probe.StubbornWorker)
    pids = pids_of(group)
    assert group.shutdown() is False
    assert "will not leave" in caplog.text
    wait_until_gone(pids)


def test_a_group_starts_in_the_processes_of_one_that_ended_before_it(cluster, probe, group):
    pids, addresses = pids_of(group), environments(group, "MASTER_PORT")
    with cluster.spare_hosts.keeping():
        assert group.shutdown()
    with pytest.raises(WorkerGroupError, match="has ended: it was shut down"):
        group.run_all("describe")
    after = start(cluster, probe.ProbeWorker, worker_kwargs={"greeting": "again"})
    try:
        assert pids_of(after) == pids
        assert environments(after, "MASTER_PORT") != addresses
        assert environments(after, "greeting") == ["again", "again"]
        assert after.run_all("all_reduce") == [1.0, 1.0], "a process group of its own"
        group.shutdown()
        assert pids_of(after) == pids, "they are no longer those of the group before"
        with cluster.spare_hosts.keeping():
            pass
        after.shutdown()
        last = start(cluster, probe.ProbeWorker)
        assert not set(pids_of(last)) & set(pids), "nobody has asked for them to be kept"
        last.shutdown()
    finally:
        after.shutdown()


@pytest.mark.slow
def test_spare_processes_of_another_kind_are_ended(cluster, probe, group, wait_until_gone):
    pids = pids_of(group)
    with cluster.spare_hosts.keeping():
        assert group.shutdown()
    sharding = NamedSharding(np.arange(2), ["data_parallel"])
    other = RayWorkerGroup(cluster, probe.ProbeWorker, sharding=sharding, name="other")
    try:
        assert not set(pids_of(other)) & set(pids)
        wait_until_gone(pids)
    finally:
        other.shutdown()


@pytest.mark.slow
def test_a_group_that_has_failed_leaves_no_spare_processes(cluster, probe, group, wait_until_gone):
    pids = pids_of(group)
    os.kill(pids[1], signal.SIGKILL)
    wait_until_gone(pids[1:])
    with cluster.spare_hosts.keeping():
        assert not group.shutdown()
    wait_until_gone(pids)
    after = start(cluster, probe.ProbeWorker)
    assert not set(pids_of(after)) & set(pids)
    after.shutdown()


def test_a_group_that_does_not_fit_the_bundles_is_refused(cluster, probe):
    sharding = NamedSharding(np.arange(3), ["data_parallel"])
    with pytest.raises(ValueError, match="2 bundles do not fit 3 ranks"):
        RayWorkerGroup(cluster, probe.ProbeWorker, sharding=sharding)
