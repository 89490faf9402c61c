"""New weights for a mixture of experts in a real vLLM, under the names that transformers has."""

from contextlib import contextmanager

import pytest
import rl_refit
import torch
from kept_clusters import kept_cluster
from patience import PATIENCE_S
from rl_dtensor_worker.weights import ModelWeights
from rl_policy.generation.vllm import VllmGeneration
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_oracles import (
    TEXTS,
    TOLERANCE,
    ascii_tokenizer,
    expected_logprobs,
    fail_to_refit,
    generation_config,
    prompts_of,
    refit,
    save_experts,
    sizes_for,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.needs("rl-policy[all]"),
    pytest.mark.usefixtures("shared_ray"),
]

# Not a coincidence of rounding: with the wrong weights a log-probability is off by far more.
WRONG = 1e-2


@pytest.fixture(scope="module")
def tokenizer():
    return ascii_tokenizer()


@pytest.fixture(scope="module")
def engines(tmp_path_factory, tokenizer, shared_ray):
    path = tmp_path_factory.mktemp("experts")
    save_experts(path, tokenizer)
    cluster = kept_cluster([1])
    engines = VllmGeneration(cluster, generation_config(path), tokenizer, timeout_s=PATIENCE_S)
    engines.path = path
    yield engines
    engines.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize("bucket_bytes", [16 << 10, 8 << 20], ids=["split", "whole"])
def test_experts_arrive_under_the_names_of_the_trainers_model(engines, tokenizer, bucket_bytes):
    model = AutoModelForCausalLM.from_pretrained(engines.path, dtype=torch.float32).eval()
    version = engines.weight_version + 1
    torch.manual_seed(version + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    assert mismatch(engines, model, tokenizer) > WRONG
    source = ModelWeights(model, wire_dtype=torch.float32, device=torch.device("cpu"))
    with rl_refit.RefitSender(source, bucket_bytes=bucket_bytes, timeout_s=PATIENCE_S) as sender:
        engines.init_transfer(sender.address)
        refit(engines, sender, version)
    assert mismatch(engines, model, tokenizer) < TOLERANCE


@pytest.mark.parametrize(
    ("left_out", "told"),
    [
        ("model.layers.1.mlp.experts.2.up_proj.weight", r"w13_weight \(w3 of expert 2\)"),
        ("model.layers.0.mlp.experts.0.down_proj.weight", r"w2_weight \(w2 of expert 0\)"),
        ("model.layers.0.mlp.gate.weight", r"model.layers.0.mlp.gate.weight \(all\)"),
    ],
)
def test_an_expert_that_is_left_out_is_told(engines, left_out, told):
    # The checkpoint has a tensor for each expert, where the model in memory has one for all.
    kept = load_file(engines.path / "model.safetensors")
    del kept[left_out]
    version = engines.weight_version + 1
    source = rl_refit.TensorSource(kept.items())
    with rl_refit.RefitSender(source, timeout_s=PATIENCE_S) as sender:
        engines.init_transfer(sender.address)
        fail_to_refit(engines, sender, version, told=told)


_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
# As the checkpoints on the hub have them, in sizes that the CPU's kernels take.
_LATENT = {
    "q_lora_rank": 32,
    # Together 576, the one size of vLLM's latent attention on the CPU.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "mixtral": _EXPERTS,
    # vLLM's router on the CPU has no sigmoid.
    "minimax_m2": _EXPERTS
    | {"rotary_dim": 32, "scoring_func": "softmax", "use_routing_bias": True},
    "phimoe": _EXPERTS | {"attention_bias": True, "lm_head_bias": True},
    "deepseek_v2": _LATENT | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT | {"topk_method": "noaux_tc"},
    "gpt_oss": _EXPERTS,
}
# vLLM scores the others otherwise than transformers does, also when it has loaded the files itself.
SCORED_ALIKE = ("mixtral", "gpt_oss")


def save_family(path, tokenizer, model_type):
    """Write a model with random weights, and its tokenizer."""
    torch.manual_seed(0)
    sizes = sizes_for(tokenizer) | {"bos_token_id": 0}
    config = AutoConfig.for_model(model_type, **sizes | FAMILIES[model_type])
    AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    finish_directory(path, tokenizer)


def finish_directory(path, tokenizer):
    tokenizer.save_pretrained(path)
    # transformers writes the name of its own class, and the hub has vLLM's.
    file = path / "config.json"
    file.write_text(file.read_text().replace("PhimoeForCausalLM", "PhiMoEForCausalLM"))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_family_is_refitted_under_the_names_of_its_checkpoint(tmp_path, tokenizer, model_type):
    old, new = tmp_path / "old", tmp_path / "new"
    save_family(old, tokenizer, model_type)
    model = AutoModelForCausalLM.from_pretrained(old, dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn(tensor.shape) * 0.1)
    model.save_pretrained(new)
    finish_directory(new, tokenizer)
    with engines_of(old, tokenizer) as engines:
        before = greedy(engines, tokenizer)
        source = ModelWeights(model, wire_dtype=torch.float32, device=torch.device("cpu"))
        with rl_refit.RefitSender(source, bucket_bytes=64 << 10, timeout_s=PATIENCE_S) as sender:
            engines.init_transfer(sender.address)
            refit(engines, sender, 1)
        received = greedy(engines, tokenizer)
        if model_type in SCORED_ALIKE:
            assert mismatch(engines, model, tokenizer) < TOLERANCE
    assert not torch.equal(received["logprobs"], before["logprobs"])
    # The same bits as of an engine that loads the files itself.
    with engines_of(new, tokenizer) as engines:
        loaded = greedy(engines, tokenizer)
    for key in ("output_ids", "logprobs"):
        assert torch.equal(received[key], loaded[key])


@contextmanager
def engines_of(path, tokenizer):
    cluster = kept_cluster([1])
    engines = VllmGeneration(cluster, generation_config(path), tokenizer, timeout_s=PATIENCE_S)
    try:
        yield engines
    finally:
        engines.shutdown()
        cluster.shutdown()


def greedy(engines, tokenizer):
    return engines.generate(prompts_of(tokenizer, TEXTS), greedy=True)


def mismatch(engines, model, tokenizer):
    """Return the largest error of the log-probabilities under `model`."""
    output = engines.generate(prompts_of(tokenizer, TEXTS))
    expected = expected_logprobs(model, output, temperature=0.7)
    return (output["logprobs"] - expected).abs().max().item()
