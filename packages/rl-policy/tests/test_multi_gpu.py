"""A policy over two GPUs on a real Ray with NCCL; where there are none, the same over gloo."""

import numpy as np
import pytest
import ray
import torch
from backend_runs import config, plain_results, run
from patience import PATIENCE_S
from rl_policy import NamedSharding, Policy, RayVirtualCluster, RayWorkerGroup
from tolerances import assert_close
from transformers import Qwen3ForCausalLM

pytestmark = [pytest.mark.needs("rl-policy[all]")]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, marks=pytest.mark.slow, id="gloo"),
        pytest.param(
            True,
            marks=[
                pytest.mark.multi_gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
            ],
            id="nccl",
        ),
    ],
)
def use_gpus(request, shared_ray, stranger_path):
    """Whether the ranks have a GPU each; the tests' own Ray runs."""
    return request.param


def check_devices(infos, use_gpus):
    """Fail unless each rank has the GPU of its local rank, and no other rank has it."""
    indices = [info["local_device_id"] for info in infos]
    if not use_gpus:
        assert indices == [None] * len(infos)
        return
    assert indices == [info["local_rank"] for info in infos]
    assert len({info["global_device_id"] for info in infos}) == len(infos)


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        ("dtensor", {}),
        ("dtensor", {"tensor_parallel_size": 2}),
        ("megatron", {"tensor_model_parallel_size": 2}),
        ("megatron", {"pipeline_model_parallel_size": 2}),
    ],
    ids=["dtensor-dp2", "dtensor-tp2", "megatron-tp2", "megatron-pp2"],
)
def test_two_ranks_equal_a_plain_loop(backend, sizes, use_gpus, backends_model, tmp_path):
    model_path, tokenizer = backends_model
    found = run(model_path, tokenizer, backend, sizes, tmp_path, use_gpus=use_gpus)
    check_devices(found["infos"], use_gpus)
    for key, expected in plain_results(model_path).items():
        assert_close(found[key], expected, key)


@pytest.fixture(scope="module")
def ends(use_gpus, backends_model):
    """A policy on one device, and an engine's rank on another: weights cross by a collective."""
    from receiver_worker import ReceiverWorker

    model_path, tokenizer = backends_model
    clusters = [RayVirtualCluster([1], use_gpus=use_gpus, name=name) for name in ("policy", "rank")]
    section = config(model_path, "dtensor", {})
    policy = Policy(clusters[0], section, tokenizer, init_reference_model=False)
    sharding = NamedSharding(np.arange(1), ["data_parallel"])
    receivers = RayWorkerGroup(clusters[1], ReceiverWorker, sharding=sharding)
    yield policy, receivers
    receivers.shutdown()
    policy.shutdown()
    for cluster in clusters:
        cluster.shutdown()


def check_weights(found, model_path, use_gpus):
    ((tensors, devices),) = found
    expected = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32).state_dict()
    assert devices == {"cuda" if use_gpus else "cpu"}
    assert len(tensors) > 20
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_a_collective_refit_reaches_the_other_device(ends, backends_model, use_gpus):
    policy, receivers = ends
    addresses = policy.open_refit(1, transport="collective", bucket_bytes=1 << 14)
    receivers.run_all("connect", *addresses)
    for version in (1, 2):
        receiving = receivers.submit_all("receive", version)
        report = policy.send_weights(version)
        check_weights(receivers.wait(receiving, timeout_s=PATIENCE_S), backends_model[0], use_gpus)
        assert report["refit_bytes"] > 0


def test_the_documented_broadcast_reaches_the_other_device(ends, backends_model, use_gpus):
    policy, receivers = ends
    node = RayVirtualCluster([1], use_gpus=False)
    ip, port = node.get_master_address_and_port()
    node.shutdown()
    info = policy.prepare_info_for_collective()
    joining = receivers.submit_all("join", ip, port, 2)
    ray.get(policy.init_collective(ip, port, 2), timeout=PATIENCE_S)
    receivers.wait(joining, timeout_s=PATIENCE_S)
    receiving = receivers.submit_all("receive_broadcast", info)
    ray.get(policy.broadcast_weights_for_collective(), timeout=PATIENCE_S)
    check_weights(receivers.wait(receiving, timeout_s=PATIENCE_S), backends_model[0], use_gpus)
