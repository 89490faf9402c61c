"""Layouts, planned and refused in plain numbers."""

import pytest
from rl_interfaces import ParallelLayout
from rl_megatron_worker.model.config import Architecture
from rl_megatron_worker.parallel.groups import MegatronLayout, check_sizes, plan_layout


def section(**overrides):
    return {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": False,
        "moe_token_dispatcher_type": "alltoall",
    } | overrides


def architecture(**overrides):
    fields = {
        "num_layers": 8,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
    }
    return Architecture(
        transformer=fields | overrides,
        vocab_size=61,
        max_sequence_length=64,
        tied_embeddings=False,
        rotary_base=1e4,
    )


def test_a_layout_says_who_shares_what():
    layout = plan_layout(
        section(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            context_parallel_size=2,
            sequence_parallel=True,
            virtual_pipeline_model_parallel_size=2,
        ),
        world_size=16,
    )
    assert layout == MegatronLayout(
        data=2,
        tensor=2,
        pipeline=2,
        context=2,
        expert_tensor=2,
        virtual_stages=2,
        sequence_parallel=True,
    )
    assert layout.world_size == 16
    assert layout.token_multiple == 8
    assert layout.for_driver == ParallelLayout(
        data_parallel=2, pipeline_parallel=2, context_parallel=2, tensor_parallel=2
    )


def test_one_chunk_per_rank_is_no_virtual_pipeline():
    layout = plan_layout(
        section(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=1),
        world_size=2,
    )
    assert layout.virtual_stages is None
    assert layout.token_multiple == 1


REFUSED = {
    "world": (
        {"tensor_model_parallel_size": 3},
        r"tensor_model_parallel_size=3 .* does not divide world_size=4",
    ),
    "zero": ({"context_parallel_size": 0}, r"context_parallel_size=0 must be at least 1"),
    "experts": (
        {"expert_model_parallel_size": 3},
        r"expert_model_parallel_size=3 times .* does not divide world_size=4",
    ),
    "virtual": (
        {"virtual_pipeline_model_parallel_size": 2},
        r"virtual_pipeline_model_parallel_size=2 needs .*pipeline_model_parallel_size > 1",
    ),
    "first": (
        {"num_layers_in_first_pipeline_stage": 2},
        r"num_layers_in_first_pipeline_stage=2 needs .*pipeline_model_parallel_size > 1",
    ),
    "none-in-last": (
        {"num_layers_in_last_pipeline_stage": 0, "pipeline_model_parallel_size": 2},
        r"num_layers_in_last_pipeline_stage=0 must be at least 1",
    ),
    "dispatcher": ({"moe_token_dispatcher_type": "flex"}, r"'flex' must be 'alltoall' or"),
    "gathered-experts": (
        {"moe_token_dispatcher_type": "allgather", "expert_model_parallel_size": 2},
        r"'allgather' does not support sequences of different .*expert_model_parallel_size=2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_refused_by_name(case):
    overrides, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        plan_layout(section(**overrides), world_size=4)


EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24}
DOES_NOT_DIVIDE = {
    "heads": ({"tensor": 8}, {}, r"tensor_model_parallel_size=8 .* 4 attention heads"),
    "groups": ({"tensor": 4}, {}, r"tensor_model_parallel_size=4 .* 2 query groups"),
    "units": ({"tensor": 2}, {"ffn_hidden_size": 49}, r"size=2 .* 49 MLP units"),
    "experts": ({"expert": 3}, EXPERTS, r"expert_model_parallel_size=3 .* 4 experts"),
    "no-experts": ({"expert": 2}, {}, r"expert_model_parallel_size=2 needs an MoE"),
    "expert-parts": (
        {"tensor": 2, "sequence_parallel": True, "expert_tensor": 1},
        EXPERTS,
        r"expert_tensor_parallel_size=1 differs from tensor_model_parallel_size=2",
    ),
    "tokens": (
        {"tensor": 2, "expert_tensor": 2},
        EXPERTS,
        r"MoE model needs .*sequence_parallel=True",
    ),
    "layers": ({"pipeline": 3}, {}, r"pipeline_model_parallel_size=3 .* 8 layers"),
    "first": ({"pipeline": 3, "first_stage_layers": 1}, {}, r"8 layers \(first stage: 1"),
    "all-in-first": ({"pipeline": 2, "first_stage_layers": 8}, {}, r"8 layers \(first stage: 8"),
    "both": (
        {"pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 4},
        {},
        r"8 layers \(first stage: 3, last stage: 4\)",
    ),
    "chunks": ({"pipeline": 2, "virtual_stages": 3}, {}, r"size=3 does not divide the 4 layers"),
}


@pytest.mark.parametrize("case", DOES_NOT_DIVIDE)
def test_a_model_that_does_not_divide_is_refused_by_number(case):
    layout, model, message = DOES_NOT_DIVIDE[case]
    with pytest.raises(ValueError, match=message):
        check_sizes(architecture(**model), MegatronLayout(data=1, **layout))


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "expert_tensor": 2, "pipeline": 2, "virtual_stages": 2},
        {"pipeline": 3, "first_stage_layers": 2},
        {"pipeline": 2, "first_stage_layers": 3},
        {"pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 5},
    ],
)
def test_a_model_that_divides_is_taken(layout):
    check_sizes(architecture(), MegatronLayout(data=1, **layout))
