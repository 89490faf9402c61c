"""`forward_backward` and `optimizer_step` add up to `train`; the kit has the rules beyond."""

import pytest
import split_ranks
import torch
from batches import make_batch, make_config
from tiny_models import build_tiny
from tolerances import SUMS

# Of weights, whose largest are about 1, and of norms.
TOLERANCE = SUMS
# Linear in the gradients: Adam makes steps of rounding errors, of weights whose gradient is 0.
SGD = {"optimizer": "sgd", "lr": 0.1, "sgd_momentum": 0.9}
# Rows of unlike lengths in calls of 1, 4 and 3 rows: a rank has none, and counts differ.
EDGES = (0, 1, 5, 8)
TP, PP, CP = (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))

# The distributed optimizer is Adam's alone: nearly linear with a large epsilon.
DISTRIBUTED = {"use_distributed_optimizer": True, "optimizer": "adam", "lr": 0.01, "adam_eps": 0.1}
OVERLAP = {"distributed_data_parallel_config": {"overlap_grad_reduce": True}}
GATHERING = {
    "distributed_data_parallel_config": {"overlap_grad_reduce": True, "overlap_param_gather": True}
}
CASES = {
    "dp2": (2, {}, {}, "nll", None),
    "pp2-sequence": (2, {PP: 2}, {}, "sequence", None),
    "dp2-overlap": (2, OVERLAP, {}, "nll", None),
    "dp2-overlap-distributed": (2, GATHERING, DISTRIBUTED, "nll", None),
    "tp2-sp-packed": (2, {TP: 2, "sequence_parallel": True}, {}, "nll", "sequence_packing"),
    "one-logits": (1, {}, {}, "logits", None),
    "dp2-distributed": (2, {}, DISTRIBUTED, "sequence", None),
    "cp2-packed": (2, {CP: 2}, {}, "nll", "sequence_packing"),
    "pp2-dp2-overlap": (4, {PP: 2, **OVERLAP}, {}, "nll", None),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=2)


def config_for(model, layout, optimizer, section):
    budgets = {"enabled": True, "train_mb_tokens": 24, "logprob_mb_tokens": 24}
    config = make_config(model, sections=None if section is None else {section: budgets}, **layout)
    config["megatron_cfg"]["optimizer"] |= SGD | optimizer
    return config


def assert_equal_weights(found, expected):
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.slow_beyond(3, every=3)
@pytest.mark.parametrize("case", CASES)
def test_calls_and_a_step_equal_train(pools, model, case):
    num_ranks, layout, optimizer, loss, section = CASES[case]
    batch = make_batch(8)
    batch["sample_mask"][2] = 0.0
    options = {
        "config": config_for(model, layout, optimizer, section),
        "batch": batch,
        "edges": EDGES,
        "loss": loss,
        "section": section,
    }
    at_once = pools(num_ranks).run(split_ranks.train_at_once, **options)
    in_calls = pools(num_ranks).run(split_ranks.train_in_calls, **options)
    for expected, found in zip(at_once, in_calls, strict=True):
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=TOLERANCE)
        assert_equal_weights(found.weights, expected.weights)
        assert min(found.losses[:3]) < expected.losses[0] < max(found.losses[:3])


@pytest.mark.parametrize("layout", [{}, OVERLAP], ids=["plain", "overlap"])
def test_split_steps_and_train_take_turns(pools, model, layout):
    config = config_for(model, layout, {}, None)
    options = {"config": config, "batch": make_batch(8), "edges": EDGES, "loss": "nll"}
    at_once = pools(2).run(split_ranks.train_at_once, **options, num_steps=6)
    in_turns = pools(2).run(split_ranks.train_in_turns, **options)
    for expected, found in zip(at_once, in_turns, strict=True):
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=TOLERANCE)
        assert_equal_weights(found.weights, expected.weights)


@pytest.mark.parametrize("layout", [{}, {PP: 2}], ids=["dp2", "pp2"])
def test_a_call_that_fails_drops_the_gradients(pools, model, layout):
    config, batch = config_for(model, layout, {}, None), make_batch(8)
    once = {"config": config, "batch": batch, "edges": (0, 8), "loss": "nll", "num_steps": 1}
    expected, *_ = pools(2).run(split_ranks.train_at_once, **once)
    for errors, norm in pools(2).run(
        split_ranks.failures_drop_gradients, config=config, batch=batch
    ):
        failed, stepped = errors
        assert "planted" in failed
        assert "call forward_backward() first" in stepped
        assert norm == pytest.approx(expected.grad_norms[0], rel=TOLERANCE)


def test_balanced_experts_are_refused(pools, tmp_path):
    model = build_tiny(tmp_path, "qwen3_moe", num_hidden_layers=2)
    balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
    config = make_config(model, **balanced)
    (message,) = pools(1).run(
        split_ranks.refusal_with_balancing, config=config, batch=make_batch(4)
    )
    reason = "policy.megatron_cfg.moe_aux_loss_coeff=0.01 adds a loss"
    assert f"forward_backward is not available: {reason}" in message
