"""The optimizer against torch's, and what it does with 16 bits."""

import pytest
import torch
from optim_ranks import (
    moved_ranks,
    overflow_ranks,
    schedule_ranks,
    small_steps_ranks,
    three_steps_ranks,
)

# Relative, of a norm of gradients that passed through float16.
FLOAT16_NORM_TOLERANCE = 2e-2

TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
# What the parity table, which trains with plain AdamW, does not hold.
CASES = {
    "one": (1, {}),
    "sgd": (1, {"sgd": True}),
    "coupled-decay": (1, {"coupled": True}),
    "dp2-overlap": (2, {"overlap": True}),
    "dp2-distributed": (2, {"is_distributed": True}),
    "dp2-distributed-overlap": (2, {"is_distributed": True, "overlap": True}),
    "tp2-sp": (2, {"layout": {TP: 2, "sequence_parallel": True}}),
    "pp2-tied-distributed": (
        2,
        {"layout": {PP: 2}, "kind": "tied", "is_distributed": True},
    ),
    "pp2-virtual2-overlap": (
        2,
        {
            "layout": {PP: 2, "virtual_pipeline_model_parallel_size": 2},
            "num_layers": 4,
            "is_distributed": True,
            "overlap": True,
        },
    ),
    "moe-ep2-distributed": (
        2,
        {
            "layout": {"expert_model_parallel_size": 2},
            "kind": "moe",
            "is_distributed": True,
        },
    ),
}


@pytest.mark.slow_beyond(3, every=4)
@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_torch(pools, case):
    num_ranks, given = CASES[case]
    for each in pools(num_ranks).run(three_steps_ranks, **given):
        assert each["clipped"], "the limit of the norm is to matter"
        assert each["norms"] <= 1
        assert each["parameters"] <= 1


def test_rate_and_decay_change_once_per_train_call(pools):
    [found] = pools(1).run(schedule_ranks)
    assert found["rates"] == pytest.approx([0.0, 5e-4, 1e-3, 5e-4, 0.0, 0.0])
    assert found["decays"] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("is_distributed", [False, True])
def test_float32_copies_gather_steps_that_are_too_small_for_bfloat16(pools, is_distributed):
    [changes] = pools(1).run(small_steps_ranks, is_distributed=is_distributed)
    # 40 steps of 2e-5 are less than half of the distance of two weights of 0.1 and above, but the
    # largest of them crosses the middle sooner or later.
    assert changes[0] < 4e-3
    assert changes[-1] > changes[0]


@pytest.mark.parametrize(("num_ranks", "kind"), [(1, "dense"), (1, "moe"), (2, "moe")])
def test_overflow_halves_every_scale_and_changes_nothing(pools, num_ranks, kind):
    layout = {"expert_model_parallel_size": num_ranks}
    for found in pools(num_ranks).run(overflow_ranks, kind=kind, layout=layout):
        assert not found["finite"]
        assert found["norm"] == float("inf")
        assert found["same"]
        assert set(found["scales"]) == {2.0**15}
        assert found["changed"]
        expected = pytest.approx(found["reference_norm"], rel=FLOAT16_NORM_TOLERANCE)
        assert found["finite_norm"] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_distributed", [False, True])
def test_training_goes_on_exactly_after_its_state_has_been_moved(pools, is_distributed, dtype):
    assert pools(1).run(moved_ranks, is_distributed=is_distributed, dtype=dtype) == [True]
