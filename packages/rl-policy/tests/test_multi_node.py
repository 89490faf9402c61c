"""Two Ray nodes on one machine."""

import numpy as np
import pytest
import ray
import torch
from patience import PATIENCE_S
from plain_backend import PairModel
from ray.cluster_utils import Cluster
from rl_batched_data import BatchedDataDict
from rl_policy import NamedSharding, Policy, RayVirtualCluster, RayWorkerGroup
from rl_policy.ray import cluster as cluster_module
from rl_policy.ray.failures import WorkerDiedError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tolerances import REPEATED
from transformers import PreTrainedTokenizerFast

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def nodes(ray_apart, stranger_path):
    """A head with two CPUs, another node with two, and this process not connected to them."""
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", nodes.address)
        nodes.add_node(num_cpus=2)
        nodes.wait_for_nodes()
        yield nodes
        ray.shutdown(wait_for_processes=True)
    nodes.shutdown()


@pytest.fixture(scope="module")
def worker_class(stranger_path):
    import probe_worker

    return probe_worker.ProbeWorker


def start(cluster, worker_class):
    sharding = NamedSharding(np.arange(cluster.world_size()), ["data_parallel"])
    return RayWorkerGroup(cluster, worker_class, sharding=sharding, name="probe")


def test_each_node_receives_the_rows_of_its_ranks(nodes, worker_class):
    data = BatchedDataDict(word=[f"row {row}" for row in range(10)], number=torch.arange(10))
    plans = data.plan_by_batch_size(4, 8, allow_uneven_shards=True)
    cluster = RayVirtualCluster([2, 2], use_gpus=False)
    group = start(cluster, worker_class)
    try:
        answers = group.run_sharded("echo", data, plans)
        expected = [[f"row {row}" for row in plan.rows] for plan in plans]
        assert [words for _, words, _ in answers] == expected
    finally:
        assert group.shutdown() is True
        cluster.shutdown()


@pytest.mark.parametrize("bundles", [[2, 2], [1, 1, 1, 1], [4]])
def test_ranks_of_a_node_follow_each_other(nodes, worker_class, bundles):
    cluster = RayVirtualCluster(bundles, use_gpus=False)
    group = start(cluster, worker_class)
    try:
        answers = group.run_all("describe")
        assert [answer["LOCAL_RANK"] for answer in answers] == ["0", "1", "0", "1"]
        assert {answer["LOCAL_WORLD_SIZE"] for answer in answers} == {"2"}
        node_ids = [answer["node_id"] for answer in answers]
        assert node_ids[0] == node_ids[1] != node_ids[2] == node_ids[3]
        assert group.run_all("all_reduce") == [6.0] * 4
    finally:
        assert group.shutdown() is True
        cluster.shutdown()
    assert ray.is_initialized()  # a Ray that was joined goes on


def test_a_policy_runs_across_the_nodes(nodes, tmp_path):
    torch.manual_seed(0)
    model = PairModel(16)
    model.save(tmp_path)
    words = {"<pad>": 0, **{f"w{index}": index for index in range(1, 16)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")), pad_token="<pad>"
    )
    data = BatchedDataDict(
        {
            "input_ids": torch.tensor([[3, 4, 5], [6, 7, 0], [8, 9, 10]]),
            "input_lengths": torch.tensor([3, 2, 3]),
        }
    )
    config = {"model_name": str(tmp_path), "timeout_s": PATIENCE_S, "plain_cfg": {"enabled": True}}
    cluster = RayVirtualCluster([1, 1], use_gpus=False, placement_group_strategy="SPREAD")
    policy = Policy(cluster, config, tokenizer, init_optimizer=False)
    try:
        scores = policy.get_logprobs(data)["logprobs"]
    finally:
        assert policy.shutdown() is True
        cluster.shutdown()
    expected = model(data["input_ids"]).log_softmax(-1)
    for row, position in ((0, 1), (0, 2), (1, 1), (2, 1), (2, 2)):
        token = data["input_ids"][row, position]
        found = scores[row, position]
        torch.testing.assert_close(found, expected[row, position - 1, token], rtol=REPEATED, atol=0)


def test_bundles_that_no_node_holds_together_are_refused(nodes, monkeypatch):
    monkeypatch.setattr(cluster_module, "_RESERVE_LIMIT_S", 1.0)
    cluster = RayVirtualCluster([3], use_gpus=False, placement_group_strategy="STRICT_PACK")
    with pytest.raises(TimeoutError, match=r"'STRICT_PACK': 3 CPU asked \(\d free of 4\)"):
        cluster.get_placement_groups()


def test_a_node_that_is_lost_is_noticed(nodes, worker_class):
    extra = nodes.add_node(num_cpus=4)
    nodes.wait_for_nodes()
    cluster = RayVirtualCluster([4], use_gpus=False, placement_group_strategy="STRICT_PACK")
    group = start(cluster, worker_class)
    call = group.submit_all("sleep", 3600)
    nodes.remove_node(extra, allow_graceful=False)
    with pytest.raises(WorkerDiedError, match=r"rank \d of probe died during sleep"):
        group.wait(call)
    cluster.shutdown()
