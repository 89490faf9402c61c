"""Routes of a real vLLM, taken again by the policy that trains on its samples."""

import pytest
import torch
from kept_clusters import kept_cluster
from patience import PATIENCE_S
from rl_policy import Policy
from rl_policy.data.batches import completion_batch
from rl_policy.generation.vllm import VllmGeneration
from vllm_oracles import TEXTS, ascii_tokenizer, generation_config, prompts_of, save_experts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.needs("rl-policy[all]"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# In bfloat16 the engine and the trainer round a router's scores otherwise.
PRECISION = "bfloat16"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("experts"), ascii_tokenizer()
    save_experts(path, tokenizer)
    return path, tokenizer


@pytest.fixture(scope="module")
def samples(model, shared_ray):
    path, tokenizer = model
    cluster = kept_cluster([1])
    config = generation_config(
        path,
        precision=PRECISION,
        return_routed_experts=True,
        kv_cache_memory_bytes=256 << 20,
    )
    engines = VllmGeneration(cluster, config, tokenizer, timeout_s=PATIENCE_S)
    output = engines.generate(prompts_of(tokenizer, TEXTS * 8))
    engines.shutdown()
    cluster.shutdown()
    return output


def test_all_tokens_but_the_last_have_routes(samples):
    routes, lengths = samples["routed_experts"], samples["unpadded_sequence_lengths"]
    assert routes.shape == (*samples["output_ids"].shape, 2, 2)
    is_given = torch.arange(routes.shape[1]) < lengths[:, None] - 1
    assert ((routes[is_given] >= 0) & (routes[is_given] < 4)).all()
    assert (routes[~is_given] == -1).all()


def test_the_policy_takes_them_again_and_is_nearer_to_the_sampler(model, samples):
    path, tokenizer = model
    cluster = kept_cluster([1])
    section = {
        "model_name": str(path),
        "precision": PRECISION,
        "megatron_cfg": {"enabled": True, "moe_router_replay": True},
        "train_global_batch_size": 8,
        "train_micro_batch_size": 4,
        "logprob_batch_size": 4,
        "max_total_sequence_length": 48,
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}},
        "timeout_s": PATIENCE_S,
    }
    policy = Policy(cluster, section, tokenizer, init_reference_model=False)
    batch = completion_batch(samples)
    given = policy.get_logprobs(batch)
    routes = batch.pop("routed_experts")
    own = policy.get_logprobs(batch)
    policy.shutdown()
    cluster.shutdown()
    assert "routed_experts" not in given  # it has taken those of the batch
    # The order of a token's experts says nothing. By chance one token in six has the same two.
    differs = (own["routed_experts"].sort(-1).values != routes.sort(-1).values).any(-1)
    is_given = (routes >= 0).all(-1)
    assert differs[is_given].float().mean() < 0.1
    # A token's route decides on the log-probability of the next one.
    is_next = (differs & is_given).any(-1).roll(1, dims=1)
    near, far = (mismatch(batch, scores["logprobs"], is_next) for scores in (given, own))
    assert near < far or not is_next.any()


def mismatch(batch, logprobs, where):
    difference = (logprobs - batch["generation_logprobs"]) * batch["token_mask"]
    return difference[where].abs().sum().item()
