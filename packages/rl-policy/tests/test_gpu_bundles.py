"""Bundles with GPUs, on a Ray that is told of two: it counts them, and nothing computes on one."""

import numpy as np
import pytest
import ray
from rl_policy import NamedSharding, RayVirtualCluster, RayWorkerGroup


@pytest.fixture(scope="module")
def worker_class(ray_apart, stranger_path):
    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False)
    import probe_worker

    return probe_worker.ProbeWorker


def start(cluster, worker_class):
    sharding = NamedSharding(np.arange(2), ["data_parallel"])
    return RayWorkerGroup(cluster, worker_class, sharding=sharding)


def own_gpu(answer):
    return answer["CUDA_VISIBLE_DEVICES"].split(",")[int(answer["LOCAL_RANK"])]


@pytest.mark.slow
def test_groups_that_share_a_cluster_share_each_ranks_gpu(worker_class):
    cluster = RayVirtualCluster([2], max_colocated_worker_groups=2)  # GPUs, as Ray sees some
    assert cluster.get_placement_groups()[0].bundle_specs == [{"CPU": 2.0, "GPU": 1.0}] * 2
    groups = [start(cluster, worker_class), start(cluster, worker_class)]
    try:
        first, second = [[own_gpu(a) for a in group.run_all("describe")] for group in groups]
        assert first == second
        assert sorted(first) == ["0", "1"]
    finally:
        for group in groups:
            group.shutdown()
        cluster.shutdown()


def test_a_workers_module_sees_the_gpus_of_all_ranks_when_it_is_imported(worker_class):
    """Not that of its own rank alone, as which `cuda:1` would be none."""
    cluster = RayVirtualCluster([2])
    group = start(cluster, worker_class)
    try:
        answers = group.run_all("describe")
        assert [answer["gpus_at_import"] for answer in answers] == ["0,1", "0,1"]
    finally:
        group.shutdown()
        cluster.shutdown()


def test_gpus_that_are_not_wanted_are_not_seen(worker_class):
    cluster = RayVirtualCluster([2], use_gpus=False)
    group = start(cluster, worker_class)
    try:
        seen = {answer["CUDA_VISIBLE_DEVICES"] for answer in group.run_all("describe")}
        assert seen == {""}
    finally:
        group.shutdown()
        cluster.shutdown()


def test_more_gpus_than_a_node_has_are_refused(worker_class):
    cluster = RayVirtualCluster([2], num_gpus_per_node=1)
    with pytest.raises(ValueError, match=r"\[0\]=2 is more than num_gpus_per_node=1"):
        cluster.get_placement_groups()
