"""The policy over two ranks of Megatron-core, against plain transformers and a plain loop."""

import copy

import pytest
from backend_runs import (
    config,
    plain_results,
)
from rl_policy import Policy, RayVirtualCluster
from rl_policy.planning import plan_memory
from tolerances import assert_close

pytestmark = [pytest.mark.needs("rl-policy[megatron]")]


@pytest.mark.promise
def test_it_scores_and_trains_as_a_plain_loop_over_transformers_does(
    megatron_results, backends_model
):
    for key, expected in plain_results(backends_model[0]).items():
        assert_close(megatron_results[key], expected, key)


@pytest.mark.slow
def test_a_plan_refuses_a_backend_that_it_cannot_trace():
    with pytest.raises(ValueError, match=r"plan with policy\.dtensor_cfg\.enabled=true"):
        plan_memory(["policy.megatron_cfg.enabled=true"], gpus=4, memory="80GB")


def test_what_a_backend_cannot_do_is_said_before_anything_starts(backends_model):
    model_path, tokenizer = backends_model
    wrong = config(model_path, "megatron", {"pipeline_model_parallel_size": 2})
    uneven = copy.deepcopy(wrong)
    uneven["megatron_cfg"]["num_layers_in_first_pipeline_stage"] = 2
    cluster = RayVirtualCluster([2], use_gpus=False)
    with pytest.raises(ValueError, match="does not divide the model's 2 layers"):
        Policy(cluster, uneven, tokenizer)
    with pytest.raises(ValueError, match="tensor_model_parallel_size=3"):
        Policy(
            cluster,
            config(model_path, "megatron", {"tensor_model_parallel_size": 3}),
            tokenizer,
        )
