"""The same worker on one CUDA device with NCCL, against the CPU oracle."""

import checkpoint_ranks
import pytest
import scoring_ranks
import state_ranks
import torch
import training_ranks
from oracle import load, plain_logprobs, plain_training
from tiny_model import make_batch, make_config
from tolerances import assert_all_close, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_logprobs_equal_plain_transformers(pools, tiny_model):
    batch = make_batch(7)
    (scores,) = pools(1).run(scoring_ranks.score, config=make_config(tiny_model), batch=batch)
    expected = plain_logprobs(load(tiny_model), batch)
    assert scores.device.type == "cpu"
    assert_close(scores, expected)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_three_steps_equal_a_plain_loop(pools, tiny_model, cpu_offload):
    parameters, losses, _ = plain_training(
        tiny_model, make_batch(8), global_batch_size=4, num_calls=3
    )
    section = {"enabled": True, "cpu_offload": cpu_offload}
    (trained,) = pools(1).run(
        training_ranks.train,
        config=make_config(tiny_model, dtensor_cfg=section),
        batch=make_batch(8),
        num_calls=3,
    )
    assert_all_close(trained.parameters, parameters)
    assert_close(trained.losses, losses, "losses")


def test_greedy_equals_transformers(pools, tiny_model):
    batch = make_batch(5)
    (generated,) = pools(1).run(
        scoring_ranks.generate, config=make_config(tiny_model), batch=batch, greedy=True
    )
    model = load(tiny_model)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        expected = model.generate(
            batch["input_ids"][row : row + 1, :length], do_sample=False, max_new_tokens=8
        )[0]
        output = generated.outputs[-1]
        total = int(output["unpadded_sequence_lengths"][row])
        assert output["output_ids"][row, :total].tolist() == expected.tolist()


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_each_state_holds_what_it_says(pools, tiny_model, cpu_offload):
    section = {"enabled": True, "cpu_offload": cpu_offload}
    (states,) = pools(1).run(
        state_ranks.devices_in_each_state,
        config=make_config(tiny_model, dtensor_cfg=section),
        batch=make_batch(4),
    )
    resident = "cpu" if cpu_offload else "cuda"
    devices = {name: state[:3] for name, state in states.items()}  # parameters, optimizer, buffers
    assert devices["training"] == ({resident}, {resident}, {"cuda"})
    assert devices["inference"] == ({resident}, {"cpu"}, {"cuda"})
    assert devices["refitting"] == ({resident}, {"cpu"}, {"cuda"})
    assert devices["offloaded"] == ({"cpu"}, {"cpu"}, {"cpu"})
    assert states["offloaded"].memory_mb < states["training"].memory_mb


def test_offload_and_reload_is_bit_exact(pools, tiny_model):
    arguments = {"config": make_config(tiny_model), "batch": make_batch(8)}
    (stayed,) = pools(1).run(state_ranks.offload_and_reload, offload=False, **arguments)
    (moved,) = pools(1).run(state_ranks.offload_and_reload, offload=True, **arguments)
    assert all(torch.equal(stayed[name], moved[name]) for name in stayed)


def test_reference_and_random_state(pools, tiny_model):
    batch = make_batch(8)
    (scores,) = pools(1).run(
        state_ranks.reference_stays, config=make_config(tiny_model), batch=batch
    )
    assert torch.equal(scores.reference[0], scores.reference[2])
    assert (scores.policy[2] - scores.policy[0]).abs().max() > 1e-3
    (outcome,) = pools(1).run(
        training_ranks.eval_leaves_no_trace, config=make_config(tiny_model), batch=batch
    )
    assert outcome.same_shards
    assert outcome.same_random


def test_a_checkpoint_continues_bit_for_bit(pools, tiny_model, tmp_path):
    arguments = {
        "config": make_config(tiny_model),
        "batch": make_batch(8),
        "directory": str(tmp_path),
    }
    (before,) = pools(1).run(checkpoint_ranks.train_save_train, **arguments)
    (after,) = pools(1).run(checkpoint_ranks.load_and_train, **arguments)
    assert all(torch.equal(shard, after.shards[name]) for name, shard in before.shards.items())
    assert torch.equal(before.sampled, after.sampled)


def test_information(pools, tiny_model, tmp_path):
    (outcome,) = pools(1).run(
        state_ranks.describe, config=make_config(tiny_model), directory=str(tmp_path)
    )
    assert outcome.device_id.startswith("GPU-")
    assert outcome.info["memory_allocated_mb"] > 0
    assert outcome.info["local_device_id"] == 0


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains(pools, tiny_model, precision):
    (trained,) = pools(1).run(
        training_ranks.train,
        config=make_config(tiny_model, precision=precision),
        batch=make_batch(8),
        num_calls=3,
    )
    assert torch.isfinite(trained.losses).all()
    assert trained.losses[-1] < trained.losses[1]  # the same rows, two calls later
