"""What the checks at the start of a worker say of a class that is new and does something unknown.

Each names the class, what differs and by how much, and the key to change.
"""

import re

import pytest
import strange_models
from rank_pool import RankFailure
from tiny_model import make_batch, make_config

PACKING = {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}
AMOUNT = r"by \d[\d.e+-]* of the largest"


def starting(pools, tmp_path, class_name, *, num_ranks=1, **overrides):
    config = make_config(strange_models.build_strange(tmp_path), **overrides)
    return pools(num_ranks).run(
        strange_models.start_and_generate,
        config=config,
        class_name=class_name,
        batch=make_batch(2),
    )


@pytest.mark.parametrize(
    ("class_name", "num_ranks", "overrides", "told"),
    [
        (
            "RememberingLlama",
            1,
            {"sequence_packing": PACKING},
            r"policy\.sequence_packing\.enabled=True: with .*, RememberingLlama leaks .*"
            rf"{AMOUNT}.*policy\.dtensor_cfg\.attn_implementation, or leave it out",
        ),
        (
            "RememberingLlama",
            2,
            {"dtensor_cfg": {"enabled": True, "context_parallel_size": 2}},
            r"policy\.dtensor_cfg\.context_parallel_size=2: with .*, RememberingLlama leaks .*"
            rf"{AMOUNT}.*policy\.dtensor_cfg\.attn_implementation",
        ),
        (
            "RememberingLlama",
            1,
            {"dtensor_cfg": {"enabled": True, "share_prefixes": True}},
            r"policy\.dtensor_cfg\.share_prefixes=True: with .*, RememberingLlama leaks .*"
            rf"{AMOUNT}.*policy\.dtensor_cfg\.attn_implementation, or leave it out",
        ),
        (
            "OrderedLlama",
            1,
            {"sequence_packing": PACKING},
            r"policy\.sequence_packing\.enabled=True: OrderedLlama does not run so: RuntimeError: "
            r"positions must rise\. Leave the key out \(policy\.dynamic_batching takes",
        ),
        (
            "ForeseeingLlama",
            1,
            {},
            rf"policy\.model_name: ForeseeingLlama is not causal: .*{AMOUNT}",
        ),
        (
            "MeasuringLlama",
            1,
            {},
            rf"policy\.model_name: MeasuringLlama is not causal: padding .*{AMOUNT}",
        ),
        (
            "TrainedLlama",
            1,
            {},
            rf"policy\.model_name: TrainedLlama computes otherwise in training .*{AMOUNT} logit.*"
            r"policy\.dtensor_cfg\.model_dropout",
        ),
    ],
    ids=["packing", "layout", "sharing", "running", "causality", "padding", "training"],
)
def test_what_would_be_wrong_is_refused(pools, tmp_path, class_name, num_ranks, overrides, told):
    with pytest.raises(RankFailure, match=told) as failure:
        starting(pools, tmp_path, class_name, num_ranks=num_ranks, **overrides)
    assert failure.value.kind == "ValueError"


def test_what_is_computed_otherwise_in_training_can_be_asked_for(pools, tmp_path):
    section = {"enabled": True, "model_dropout": True}
    ((*warnings,),) = starting(pools, tmp_path, "TrainedLlama", dtensor_cfg=section)
    assert not any("computes otherwise" in each for each in warnings)


@pytest.mark.parametrize(
    ("class_name", "told"),
    [
        (
            "RememberingLlama",
            rf"generate: with a cache .* RememberingLlama gives other logits .*{AMOUNT}.*"
            r"policy\.generation\.backend",
        ),
        (
            "ShiftingLlama",
            r"policy\.model_name: ShiftingLlama .*policy\.train_micro_batch_size and "
            rf"policy\.logprob_batch_size bound: it changes its logits {AMOUNT}",
        ),
    ],
    ids=["decoder", "head"],
)
def test_what_is_done_in_a_slower_way_is_said_once(pools, tmp_path, class_name, told):
    ((warning,),) = starting(pools, tmp_path, class_name)
    assert re.search(told, warning), warning
