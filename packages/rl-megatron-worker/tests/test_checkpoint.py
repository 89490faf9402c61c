"""Checkpoints: training goes on as if it had not stopped, in this layout and in others."""

import pytest
import torch
from checkpoint_ranks import (
    dying_writer_ranks,
    failing_writer_ranks,
    going_back_ranks,
    refused_ranks,
    resume_ranks,
    save_ranks,
    weights_only_ranks,
)
from forked_ranks import RankFailure
from rl_megatron_worker.checkpoint import load_weights, without_extra_states
from tolerances import REPEATED

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
SAME = {
    "one": (1, {}),
    "distributed-dp2": (2, {"is_distributed": True}),
    "tp2-bfloat16": (2, {"layout": TP2, "dtype": torch.bfloat16}),
    "pp2-virtual2-distributed": (2, {"layout": VPP2, "is_distributed": True}),
    "ep2-distributed": (2, {"layout": EP2, "kind": "moe", "is_distributed": True}),
    "float16": (1, {"dtype": torch.float16, "is_distributed": True}),
}


@pytest.mark.slow_beyond(2, every=3)
@pytest.mark.parametrize("case", SAME)
@pytest.mark.promise_first(1)
def test_training_goes_on_exactly(pools, tmp_path, case):
    num_ranks, given = SAME[case]
    before = pools(num_ranks).run(save_ranks, directory=str(tmp_path), **given)
    after = pools(num_ranks).run(resume_ranks, directory=str(tmp_path), reference_step=1, **given)
    for old, new in zip(before, after, strict=True):
        assert new["digest"] == old["digest"]
        assert new["norm"] == old["norms"][1]
        assert new["random"]
        assert new["drawn"] == old["drawn"][1]
        assert new["calls"] == 1
        assert old["children"] == 0


OTHERS = {
    "tp2-to-one": (2, {"layout": TP2}, 1, {}),
    "tp2-to-pp2": (2, {"layout": TP2}, 2, {"layout": PP2}),
    "one-to-tp2": (1, {}, 2, {"layout": TP2}),
    "tp2-to-pp2-distributed": (
        2,
        {"layout": TP2, "is_distributed": True},
        2,
        {"layout": PP2, "is_distributed": True},
    ),
    "pp2-to-virtual2": (2, {"layout": PP2}, 2, {"layout": VPP2}),
    "tied-tp2-to-pp2": (2, {"layout": TP2, "kind": "tied"}, 2, {"layout": PP2, "kind": "tied"}),
}


@pytest.mark.slow_beyond(2, every=3)
@pytest.mark.parametrize("case", OTHERS)
def test_training_goes_on_in_another_layout(pools, tmp_path, case):
    num_before, before, num_after, after = OTHERS[case]
    [old, *_] = pools(num_before).run(save_ranks, directory=str(tmp_path), **before)
    for new in pools(num_after).run(
        resume_ranks, directory=str(tmp_path), reference_step=1, **after
    ):
        assert new["norm"] == pytest.approx(old["norms"][1], rel=REPEATED)
        # Chunks are of the same ranks.
        assert new["random"] == (case == "pp2-to-virtual2")


def test_optimizer_state_of_expert_parallelism_needs_expert_parallelism(pools, tmp_path):
    pools(2).run(save_ranks, directory=str(tmp_path), layout=EP2, kind="moe")
    with pytest.raises(RankFailure, match=r"size>1, and cannot be loaded with .*size=1") as raised:
        pools(1).run(resume_ranks, directory=str(tmp_path), reference_step=1, kind="moe")
    assert raised.value.kind == "ValueError"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_come_alone_are_taken_up_by_the_optimizer(pools, tmp_path, dtype):
    [difference] = pools(1).run(weights_only_ranks, directory=str(tmp_path), dtype=dtype)
    assert difference == 0.0


@pytest.mark.parametrize(
    ("dtype", "paths", "message"),
    [
        (torch.float32, ("tied", None), "tied' is no checkpoint of this model"),
        (torch.bfloat16, ("weights", "optimizer"), "optimizer"),
    ],
    ids=["of another model", "of another precision"],
)
def test_a_load_that_is_refused_changes_nothing(pools, tmp_path, dtype, paths, message):
    [found] = pools(1).run(refused_ranks, directory=str(tmp_path), dtype=dtype, paths=paths)
    assert message in found["error"]
    assert found["is_unchanged"]


def test_a_run_goes_back_to_the_schedule_of_an_earlier_save(pools, tmp_path):
    [found] = pools(1).run(going_back_ranks, directory=str(tmp_path))
    assert (found["saved"][0], found["later"][0]) == (2, 5)
    assert found["loaded"] == found["saved"]


def test_a_rank_that_dies_while_it_writes_fails_the_save_of_the_others(pools, tmp_path):
    with pytest.raises(RankFailure, match="died"):
        pools(2).run(dying_writer_ranks, directory=str(tmp_path), victim=1)
    # The last complete one loads.
    [found] = pools(1).run(resume_ranks, directory=str(tmp_path), reference_step=0)
    assert found["calls"] == 0


def test_what_one_rank_cannot_write_is_raised_on_all(pools, tmp_path):
    for found in pools(2).run(failing_writer_ranks, directory=str(tmp_path), victim=0):
        assert "No space left on device" in found["error"]
        assert found["left"] == ["weights"]


class WithExtraState(torch.nn.Linear):
    """A module that saves something beside its weights, as all of Transformer Engine's do."""

    def get_extra_state(self):
        return torch.empty(0)

    def set_extra_state(self, state):
        raise AssertionError("nothing of the kind is loaded")


@pytest.mark.parametrize("target", [torch.nn.Linear, WithExtraState])
def test_weights_go_between_modules_with_extra_state_and_without(target):
    source, other = torch.nn.Sequential(WithExtraState(3, 2)), torch.nn.Sequential(target(3, 2))
    assert "0._extra_state" in source.state_dict()
    saved = without_extra_states(source.state_dict())
    assert sorted(saved) == ["0.bias", "0.weight"]
    load_weights(other, saved)
    assert torch.equal(other[0].weight, source[0].weight)


def test_a_state_that_lacks_weights_is_refused_by_name():
    with pytest.raises(ValueError, match=r"lacks \['bias'\], and has \['scale'\]"):
        load_weights(torch.nn.Linear(3, 2), {"weight": torch.ones(2, 3), "scale": torch.ones(1)})
