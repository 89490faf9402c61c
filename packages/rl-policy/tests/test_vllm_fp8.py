"""New weights for engines that hold a model in block-FP8, in a real vLLM."""

import json

import pytest
import rl_refit
import torch
from kept_clusters import kept_cluster
from patience import PATIENCE_S
from rl_policy import Policy
from rl_policy.data.batches import completion_batch
from rl_policy.generation.vllm import VllmGeneration
from rl_policy.losses import ClippedPGLoss
from rl_policy.refit import WeightLink
from rl_refit import block_fp8
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm_oracles import (
    TEXTS,
    ascii_tokenizer,
    expected_logprobs,
    fail_to_refit,
    generation_config,
    prompts_of,
    sizes_for,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.needs("rl-policy[all]"),
    pytest.mark.skipif(
        not torch.cpu._is_amx_tile_supported(),
        reason="vLLM's kernel for block-FP8 on a CPU needs AMX",
    ),
]
ROWS = TEXTS[:4]
# Of a mean over tokens, in bfloat16; with other weights it is over 1.
CLOSE = 0.1
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def tokenizer():
    return ascii_tokenizer()


def save_quantized(tensors, config, path, tokenizer):
    """Write a checkpoint as `*-FP8` ones on the hub: all projections in block-FP8."""
    stored = {}
    for name, tensor in tensors.items():
        tensor = tensor.to(torch.bfloat16)
        stored[name] = tensor
        if "_proj." in name:
            stored[name], stored[name + block_fp8.SCALES] = block_fp8.quantize(tensor)
    path.mkdir()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {"quantization_config": FP8}))
    tokenizer.save_pretrained(path)
    return path


def in_full_precision(stored):
    """Return the tensors of a checkpoint that `save_quantized` wrote, in bfloat16."""
    return {
        name: block_fp8.dequantize(tensor, stored[name + block_fp8.SCALES]).bfloat16()
        if name + block_fp8.SCALES in stored
        else tensor
        for name, tensor in stored.items()
        if not name.endswith(block_fp8.SCALES)
    }


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tokenizer):
    torch.manual_seed(0)
    # Neither rows nor columns of all matrices are multiples of a block, nor of two ranks' shards.
    sizes = sizes_for(tokenizer) | {"hidden_size": 192, "intermediate_size": 384}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes | heads | {"tie_word_embeddings": False}))
    path = tmp_path_factory.mktemp("fp8") / "model"
    return save_quantized(model.state_dict(), model.config, path, tokenizer)


@pytest.fixture(scope="module")
def engines_of(tokenizer, shared_ray):
    """Return a function that starts an engine with a model."""
    started = []

    def start(path):
        cluster = kept_cluster([1])
        config = generation_config(path, precision="bfloat16")
        engines = VllmGeneration(cluster, config, tokenizer, timeout_s=PATIENCE_S)
        started.append((engines, cluster))
        return engines

    yield start
    for engines, cluster in started:
        engines.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def engines(engines_of, model_path):
    return engines_of(model_path)


def sample(engines, tokenizer):
    return engines.generate(prompts_of(tokenizer, ROWS), greedy=True)


def test_engines_hold_what_they_would_have_loaded(
    engines, engines_of, model_path, tokenizer, tmp_path
):
    """Two ranks train and send bytes; an engine that loads the same weights is equal to the bit."""
    before = sample(engines, tokenizer)
    cluster = kept_cluster([2])
    policy = Policy(
        cluster,
        {
            "model_name": str(model_path),
            "precision": "bfloat16",
            "train_global_batch_size": len(ROWS),
            "train_micro_batch_size": 1,
            "logprob_batch_size": 1,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2}},
            "dtensor_cfg": {"enabled": True},
        },
        tokenizer,
        init_reference_model=False,
    )
    try:
        batch = completion_batch(before, advantages=torch.ones(len(ROWS)))
        scores = policy.get_logprobs(batch)["logprobs"]
        policy.train(batch | {"prev_logprobs": scores}, ClippedPGLoss())
        link = WeightLink(policy, engines, is_paired=False, transport="shm")
        report = link.refit(0)
        policy.save_hf_checkpoint(str(tmp_path / "trained"))
    finally:
        policy.shutdown()
        cluster.shutdown()
    (file,) = (tmp_path / "trained").glob("*.safetensors")
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "trained")
    path = save_quantized(load_file(file), trained.config, tmp_path / "quantized", tokenizer)
    sizes = [
        each.numel() * each.element_size()
        for each in load_file(path / "model.safetensors").values()
    ]
    # Bytes on the wire are those of the quantised checkpoint.
    assert report["refit_bytes"] == sum(sizes)
    after = sample(engines, tokenizer)
    expected = sample(engines_of(path), tokenizer)
    assert torch.equal(after["output_ids"], expected["output_ids"])
    assert torch.equal(after["logprobs"], expected["logprobs"])
    assert not torch.equal(after["output_ids"], before["output_ids"])
    trained.load_state_dict(in_full_precision(load_file(path / "model.safetensors")))
    apart = (expected_logprobs(trained.eval(), after) - after["logprobs"]).abs()
    assert apart.sum() / after["generation_lengths"].sum() < CLOSE


def test_weights_without_their_scales_are_told(engines, model_path, tokenizer):
    stored = load_file(model_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    lacking = {each: tensor for each, tensor in stored.items() if each != name + block_fp8.SCALES}
    for sent, told in (
        (lacking, r"model.layers.1.mlp.down_proj.weight_scale_inv \(all\)"),
        (in_full_precision(stored), r"weight_scale_inv \(all\)"),
    ):
        with rl_refit.RefitSender(rl_refit.TensorSource(sent), timeout_s=PATIENCE_S) as sender:
            engines.init_transfer(sender.address)
            fail_to_refit(engines, sender, engines.weight_version + 1, told=told)
