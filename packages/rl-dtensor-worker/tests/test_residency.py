import pytest
import state_ranks
import torch
from tiny_model import make_batch, make_config


def test_offload_and_reload_is_bit_exact(pools, tiny_model):
    arguments = {"config": make_config(tiny_model), "batch": make_batch(8)}
    stayed = pools(2).run(state_ranks.offload_and_reload, offload=False, **arguments)
    moved = pools(2).run(state_ranks.offload_and_reload, offload=True, **arguments)
    for left, right in zip(stayed, moved, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_call_in_the_wrong_state_names_the_state_and_the_way_out(pools, tiny_model):
    (outcomes,) = pools(1).run(
        state_ranks.calls_in_wrong_states, config=make_config(tiny_model), batch=make_batch(4)
    )
    train, evaluate, logprobs, generate, train_again = outcomes
    assert "ResidencyError" in train
    assert "'inference'" in train
    assert "prepare_for_training()" in train
    assert evaluate == "allowed"
    assert "'offloaded'" in logprobs
    assert "prepare_for_lp_inference()" in logprobs
    assert "'offloaded'" in generate
    assert train_again == "allowed"


# Offloading collects no cycles, which takes 0.3 s: there must be no memory to gain from it.
@pytest.mark.parametrize(
    "section",
    [{"activation_checkpointing": True}, {"lora": {"enabled": True, "r": 4}}],
    ids=["checkpointing", "lora"],
)
def test_a_step_leaves_no_tensor_in_a_cycle(pools, tiny_model, section):
    config = make_config(tiny_model, dtensor_cfg={"enabled": True, **section})
    found = pools(2).run(state_ranks.tensors_in_cycles, config=config, batch=make_batch(8))
    assert found == [[], []]
