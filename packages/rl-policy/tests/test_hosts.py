import os

import pytest
import torch
import transformers.utils.logging as transformers_logging
from rl_policy.ray.cluster import rank_bundles
from rl_policy.ray.hosts import Placement, WorkerHost, rank_environments


def environments(placements, omp_num_threads=None):
    return rank_environments(
        placements, address="10.0.0.1", port=4000, omp_num_threads=omp_num_threads
    )


def on(node, gpu=None, num_cores=8):
    return Placement(node_id=node, gpu_ids=() if gpu is None else (gpu,), num_cores=num_cores)


def test_ranks_are_counted_over_all_nodes_and_on_each():
    found = environments([on("a"), on("a"), on("b")])
    assert [environment["RANK"] for environment in found] == ["0", "1", "2"]
    assert [environment["LOCAL_RANK"] for environment in found] == ["0", "1", "0"]
    assert [environment["LOCAL_WORLD_SIZE"] for environment in found] == ["2", "2", "1"]
    assert {environment["WORLD_SIZE"] for environment in found} == {"3"}
    assert {environment["MASTER_ADDR"] for environment in found} == {"10.0.0.1"}
    assert {environment["MASTER_PORT"] for environment in found} == {"4000"}


def test_a_rank_finds_its_gpu_at_its_local_rank():
    found = environments([on("a", "2"), on("a", "GPU-b1c2"), on("b", "0")])
    visible = [environment["CUDA_VISIBLE_DEVICES"].split(",") for environment in found]
    assert visible == [["2", "GPU-b1c2"], ["2", "GPU-b1c2"], ["0"]]
    own = [gpus[int(e["LOCAL_RANK"])] for gpus, e in zip(visible, found, strict=True)]
    assert own == ["2", "GPU-b1c2", "0"]


def test_ranks_without_a_gpu_see_none():
    found = environments([on("a"), on("a"), on("b")])
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in found] == [""] * 3


@pytest.mark.parametrize("gpu", [None, "0"])
def test_ranks_share_the_cores(gpu):
    places = [on("a", gpu), on("a", gpu), on("a", gpu), on("b", gpu, num_cores=2)]
    found = environments(places)
    assert [environment["OMP_NUM_THREADS"] for environment in found] == ["2", "2", "2", "2"]
    crowded = environments([on("a", num_cores=2)] * 4)
    assert {environment["OMP_NUM_THREADS"] for environment in crowded} == {"1"}


def test_the_users_number_of_threads_is_kept():
    for placement in (on("a"), on("a", "0")):
        (environment,) = environments([placement], omp_num_threads="5")
        assert environment["OMP_NUM_THREADS"] == "5"


def test_a_number_of_threads_that_is_none_is_refused():
    with pytest.raises(ValueError, match="OMP_NUM_THREADS='many' in the environment must be"):
        environments([on("a")], omp_num_threads="many")


def test_bundles_of_a_node_get_ranks_that_follow_each_other():
    assert rank_bundles([["a", "b"], ["a", "b"]]) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    # Rank 0 stays in the first bundle, wherever that is.
    assert rank_bundles([["z", "a"], ["z", "a"]]) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert rank_bundles([["a"] * 3]) == [(0, 0), (0, 1), (0, 2)]


def test_a_part_of_the_bundles_of_each_node_may_be_used():
    bundles = [["a", "a"], ["b", "b"]]
    assert rank_bundles(bundles, workers_per_node=[1, 2]) == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("workers_per_node", "message"),
    [
        ([3, 1], "workers_per_node=3 for node 0, which has 2 bundles"),
        ([1, 0], "workers_per_node=0 for node 1, which has 2 bundles"),
        ([1], r"workers_per_node=\[1\] does not fit 2 nodes"),
    ],
)
def test_more_bundles_than_there_are_is_refused(workers_per_node, message):
    with pytest.raises(ValueError, match=message):
        rank_bundles([["a", "a"], ["b", "b"]], workers_per_node=workers_per_node)


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("0", "0")])
def test_a_rank_draws_no_bars_unless_it_is_asked_to(monkeypatch, given, found):
    # A fork has imported transformers, which has read the variable.
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    name, threads = "HF_HUB_DISABLE_PROGRESS_BARS", str(torch.get_num_threads())
    # Set first, so that it is restored in either case.
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    WorkerHost("probe", 0).set_environment({"OMP_NUM_THREADS": threads})
    assert os.environ[name] == found
    assert transformers_logging.is_progress_bar_enabled() == (given is not None)
