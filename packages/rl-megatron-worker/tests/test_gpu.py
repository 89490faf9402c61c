"""The same worker on CUDA with NCCL, against the CPU oracle."""

import pytest
import torch
from batches import make_batch, make_config
from parity_checks import (
    LAYOUTS,
    assert_greedy_is_that_of_transformers,
    assert_parameters,
    joined,
)
from plain_loop import load, plain_logprobs, plain_training
from tiny_models import build_tiny
from tolerances import assert_close
from worker_ranks import (
    devices_in_each_state,
    generate_and_score,
    run_case,
    train_between_moves,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")


def check(pools, model, num_ranks, layout):
    batch = make_batch(6)
    results = pools(num_ranks).run(
        run_case, config=make_config(model, **layout), batch=batch, section=None, num_calls=3
    )
    parameters, losses, _ = plain_training(model, batch, global_batch_size=4, num_calls=3)
    expected = plain_logprobs(load(model), batch)
    for key in ("logprobs", "reference"):
        assert_close(joined(results, key), expected, key)
    for result in results:
        assert_close(result["losses"], losses, "losses")
        found = {name: tensor.cpu() for name, tensor in result["parameters"].items()}
        assert_parameters(found, parameters)


@pytest.mark.gpu
def test_one_device_equals_a_plain_loop(pools, model):
    check(pools, model, 1, {})


@pytest.mark.multi_gpu
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "ep2"])
def test_several_devices_equal_a_plain_loop(pools, model, layout):
    num_ranks, sizes = LAYOUTS[layout]
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    check(pools, model, num_ranks, sizes)


@pytest.mark.gpu
def test_greedy_equals_transformers(pools, model):
    batch = make_batch(5)
    results = pools(1).run(generate_and_score, config=make_config(model), batch=batch, greedy=True)
    assert_greedy_is_that_of_transformers(results, batch, model)


@pytest.mark.gpu
@pytest.mark.parametrize("distributed", [False, True])
def test_each_state_holds_what_it_says_and_moves_are_exact(pools, model, distributed):
    config = make_config(model)
    config["megatron_cfg"]["optimizer"]["use_distributed_optimizer"] = distributed
    (states,) = pools(1).run(devices_in_each_state, config=config, batch=make_batch(4))
    assert states["training"]["parameters"] == {"cuda"}
    assert states["inference"]["optimizer"] == {"cpu"}
    assert states["refitting"]["parameters"] == {"cuda"}
    assert states["offloaded"]["bytes"] < states["training"]["bytes"] / 2
    moved, stayed = (
        pools(1).run(train_between_moves, config=config, batch=make_batch(4), moves=moves)[0]
        for moves in (True, False)
    )
    assert torch.equal(moved["losses"], stayed["losses"])
