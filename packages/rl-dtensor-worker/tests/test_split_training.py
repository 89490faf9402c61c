"""`forward_backward` and `optimizer_step` add up to `train`; the kit has the rules beyond."""

import pytest
import split_ranks
import torch
from parity_layouts import LAYOUTS
from tiny_model import make_batch, make_config
from tolerances import SUMS

# Of parameters, whose largest are about 1, and of norms.
TOLERANCE = SUMS
# Linear in the gradients: AdamW makes steps of rounding errors, of biases whose gradient is 0.
OPTIMIZER = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}}
# Rows of unlike lengths in calls of 1, 4 and 3 rows: a rank has none, and counts differ.
EDGES = (0, 1, 5, 8)
CASES = {
    "one": (1, {}, "nll", None),
    "replicated-sequence": (*LAYOUTS["replicated"], "sequence", None),
    "dp2-packed": (*LAYOUTS["dp2"], "nll", "sequence_packing"),
    "tp2-logits": (*LAYOUTS["tp2"], "logits", None),
    "dp2-sequence": (*LAYOUTS["dp2"], "sequence", None),
    "dp2-dynamic": (*LAYOUTS["dp2"], "sequence", "dynamic_batching"),
    "cp2-packed": (*LAYOUTS["cp2"], "nll", "sequence_packing"),
    "hybrid": (*LAYOUTS["hybrid"], "nll", None),
    "dp2-offload": (2, {"cpu_offload": True}, "nll", None),
}


def config_for(model, layout, section, **overrides):
    dtensor = {"enabled": True, **layout}
    config = make_config(model, dtensor_cfg=dtensor, optimizer=OPTIMIZER, **overrides)
    if section is not None:
        budget = split_ranks.NUM_TOKENS
        config[section] = {"enabled": True, "train_mb_tokens": budget, "logprob_mb_tokens": budget}
    return config


def assert_equal_steps(expected, found, *, tolerance=TOLERANCE):
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=tolerance)
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(
            found.parameters[name], parameter, rtol=0, atol=tolerance, msg=name
        )


@pytest.mark.slow_beyond(4, every=4)
@pytest.mark.parametrize("case", CASES)
def test_calls_and_a_step_equal_train(pools, tiny_model, case):
    num_ranks, layout, loss, section = CASES[case]
    config = config_for(tiny_model, layout, section)
    batch = make_batch(8)
    batch["sample_mask"][2] = 0.0
    for expected, found in pools(num_ranks).run(
        split_ranks.both, config=config, batch=batch, edges=EDGES, loss=loss, section=section
    ):
        assert_equal_steps(expected, found)
        # The calls report their own rows, and not shares of the batch.
        assert len(set(found.losses)) == len(found.losses)
        assert min(found.losses[:3]) < expected.losses[0] < max(found.losses[:3])


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_one_call_and_a_step_are_bit_for_bit_train(pools, tiny_model, precision):
    config = make_config(tiny_model, precision=precision)
    for expected, found in pools(2).run(
        split_ranks.both, config=config, batch=make_batch(8), edges=(0, 8), loss="nll"
    ):
        assert found.losses == expected.losses
        assert_equal_steps(expected, found, tolerance=0)


def test_float16_calls_of_unlike_sizes(pools, tiny_model):
    config = make_config(tiny_model, precision="float16")
    # A first call with few tokens would be skipped, until the loss scale is lower.
    edges = (0, 4, 5, 8)
    for expected, found in pools(2).run(
        split_ranks.both, config=config, batch=make_batch(8), edges=edges, loss="nll"
    ):
        # A relative step of float16 is 2^-11, of the weights that forward and backward compute in.
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-3)


def test_the_loss_scale_changes_once_per_step(pools, tiny_model):
    config = make_config(tiny_model, precision="float16")
    for scales, skipped, is_kept in pools(2).run(
        split_ranks.loss_scales, config=config, batch=make_batch(8)
    ):
        assert scales == [(65536.0, 1), (32768.0, 0), (32768.0, 0)]
        assert (skipped["stepped"], skipped["grad_norm"]) == (False, 0.0)
        assert is_kept


def test_a_loss_that_is_no_sum_divided_by_its_count_is_refused(pools, tiny_model):
    for mixed, shifted, step in pools(2).run(
        split_ranks.refused_losses, config=make_config(tiny_model), batch=make_batch(8)
    ):
        assert mixed.startswith("MixedLoss has loss_type=SEQUENCE_LEVEL, and its value is not")
        assert "divided by global_valid_seqs alone" in mixed
        assert "ShiftedLoss has loss_type=TOKEN_LEVEL" in shifted
        assert "forward_backward()" in step


def test_a_pass_that_fails_drops_the_gradients(pools, tiny_model):
    for errors, (first, second) in pools(2).run(
        split_ranks.failures_drop_gradients, config=make_config(tiny_model), batch=make_batch(8)
    ):
        assert all("call forward_backward() first" in error for error in errors)
        # What failed has left nothing behind.
        assert first == pytest.approx(second, rel=TOLERANCE)
