"""The policy over two ranks of Megatron-core, against plain transformers and a plain loop."""

import copy

import pytest
import torch
from backend_runs import (
    ADAMW,
    NUM_CALLS,
    TOLERANCE,
    batch,
    config,
)
from plain_loop import plain_logprobs, train_plainly
from rl_policy import Policy, RayVirtualCluster
from rl_policy.planning import plan_memory
from transformers import Qwen3ForCausalLM

pytestmark = [pytest.mark.needs("rl-policy[megatron]")]

RELATIVE_TOLERANCE = {"rtol": 5e-6, "atol": 0}  # sums of some dozen terms, in another order


def test_it_scores_and_trains_as_a_plain_loop_over_transformers_does(
    megatron_results, backends_model
):
    found, (model_path, _) = megatron_results, backends_model
    model, data = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32), batch()
    with torch.no_grad():
        expected = plain_logprobs(model, data)
    torch.testing.assert_close(found["before"], expected, **TOLERANCE)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = train_plainly(model, optimizer, data, num_calls=NUM_CALLS, max_norm=1.0)
    torch.testing.assert_close(found["losses"], losses, **RELATIVE_TOLERANCE)
    torch.testing.assert_close(found["grad_norms"], norms, **RELATIVE_TOLERANCE)
    with torch.no_grad():
        after = plain_logprobs(model, data)
    assert (after - expected).abs().max() > 1e-3
    torch.testing.assert_close(found["after"], after, **TOLERANCE)
    torch.testing.assert_close(found["reference"], expected, **TOLERANCE)


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
