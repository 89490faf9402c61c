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
from rl_policy import Policy, RayVirtualCluster
from transformers import Qwen3ForCausalLM

pytestmark = [pytest.mark.timeout(240), pytest.mark.needs("rl-policy[megatron]")]

RELATIVE_TOLERANCE = {"rtol": 5e-6, "atol": 0}  # sums of some dozen terms, in another order


def logprobs_of(model, data):
    scores = model(data["input_ids"]).logits[:, :-1].log_softmax(-1)
    chosen = scores.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen * data["token_mask"][:, 1:], (1, 0))


def train_plainly(model, data):
    """Return loss and gradient norm of each step of a plain loop."""
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), **ADAMW), [], []
    for _ in range(NUM_CALLS):
        for start in (0, 4):
            rows = {key: column[start : start + 4] for key, column in data.items()}
            loss = -logprobs_of(model, rows).sum() / rows["token_mask"].sum()
            loss.backward()
            losses.append(loss.detach())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses), torch.stack(norms)


def test_it_scores_and_trains_as_a_plain_loop_over_transformers_does(
    megatron_results, backends_model
):
    found, (model_path, _) = megatron_results, backends_model
    model, data = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32), batch()
    with torch.no_grad():
        expected = logprobs_of(model, data)
    torch.testing.assert_close(found["before"], expected, **TOLERANCE)
    losses, norms = train_plainly(model, data)
    torch.testing.assert_close(found["losses"], losses, **RELATIVE_TOLERANCE)
    torch.testing.assert_close(found["grad_norms"], norms, **RELATIVE_TOLERANCE)
    with torch.no_grad():
        after = logprobs_of(model, data)
    assert (after - expected).abs().max() > 1e-3
    torch.testing.assert_close(found["after"], after, **TOLERANCE)
    torch.testing.assert_close(found["reference"], expected, **TOLERANCE)


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
