"""What is read into the ranks: the numbers that come out of it, how much is read, and refusals."""

import convert_ranks
import pytest
import torch
from plain_loop import load
from safetensors.torch import load_file, save_file
from tiny_models import KINDS, VOCAB_SIZE, build_tiny
from tolerances import LOGPROBS, assert_close, expected_of

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}

# Both compute in float32, in another order of additions.


def make_sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB_SIZE, (n,), generator=generator) for n in (9, 5, 14)]


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4,
}
VARIANTS = {kind: (kind, {}) for kind in KINDS} | {
    f"{kind} tied": (kind, {"tied": True}) for kind in KINDS
}
VARIANTS |= {
    "llama, other theta": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "llama, interpolated": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama 3": (
        "llama",
        {
            "head_dim": 16,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "deepseek_v2, greedy": ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None}),
    "deepseek_v2, yarn": (
        "deepseek_v2",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "deepseek_v3, yarn by factor": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.0}},
    ),
    "gemma3_text, interpolated": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
    ),
    "glm4, no biases": ("glm4", {"attention_bias": False}),
    "glm4_moe, one group": ("glm4_moe", {"n_group": 1, "topk_group": 1, "use_qk_norm": False}),
    "glm4_moe, one expert": ("glm4_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "glm4_moe, all dense": ("glm4_moe", {"first_k_dense_replace": 4}),
    "gpt_oss, not scaled": (
        "gpt_oss",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "olmo3, yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": YARN | {"attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
    ),
    "qwen2, a group per head": ("qwen2", {"num_key_value_heads": 4}),
    "qwen3, other epsilon": ("qwen3", {"rms_norm_eps": 0.1}),
    "mistral": ("mistral", {}),
    "mixtral": ("mixtral", {}),
    "qwen2_moe, as they are": ("qwen2_moe", {"norm_topk_prob": False, "qkv_bias": False}),
    "qwen2_moe, some dense": ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen3_moe, as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, one expert": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    "qwen3_next, some dense": ("qwen3_next", {"mlp_only_layers": [0, 1]}),
    "qwen3_next, all dense": ("qwen3_next", {"num_experts": 0, "linear_conv_kernel_dim": 2}),
    "qwen3_moe, some dense": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
}


@pytest.mark.slow_beyond(5, every=3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(pools, tmp_path, variant):
    kind, settings = VARIANTS[variant]
    path = build_tiny(tmp_path, kind, **settings)
    sequences = make_sequences()
    ((*found,),) = pools(1).run(convert_ranks.logits, path=path, sequences=sequences)
    model = load(path)
    for tokens, logits in zip(sequences, found, strict=True):
        expected = expected_of(
            lambda each, tokens=tokens: each(input_ids=tokens[None]).logits[0], model, LOGPROBS
        )
        assert expected.exact.abs().max() > 0.3
        assert_close(logits, expected)


@pytest.mark.parametrize(
    ("kind", "layout", "num_ranks"),
    [
        ("llama", TP2, 2),
        ("qwen2", {"pipeline_model_parallel_size": 2}, 2),
        ("qwen3_moe", {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 2),
    ],
)
def test_a_rank_reads_what_it_holds(pools, tmp_path, kind, layout, num_ranks):
    path = build_tiny(tmp_path, kind)
    for found in pools(num_ranks).run(convert_ranks.count_elements_read, path=path, layout=layout):
        assert found["num_read"] == found["num_held"]


def edit_tensors(path, edit):
    file = f"{path}/model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def drop_a_norm(tensors):
    del tensors["model.layers.1.self_attn.q_norm.weight"]


def add_a_bias(tensors):
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def narrow_the_output(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:60].contiguous()


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (drop_a_norm, r"lack 1 tensors .*first \['model.layers.1.self_attn.q_norm.weight'\]"),
        (add_a_bias, r"have 1 that .*first \['model.layers.0.self_attn.q_proj.bias'\]"),
        (narrow_the_output, r"lm_head.weight has shape \(60, 32\) in its files, and \(66, 32\)"),
    ],
)
def test_other_tensors_than_the_model_s_are_refused_on_every_rank(pools, tmp_path, edit, named):
    path = build_tiny(tmp_path, "qwen3")
    edit_tensors(path, edit)
    errors = pools(2).run(convert_ranks.load_that_fails, path=path, layout=TP2)
    for error in errors:
        assert error.startswith(f"ValueError: policy.model_name={path!r}")
        with pytest.raises(ValueError, match=named):
            raise ValueError(error)


def test_frequencies_in_old_files_are_not_read(pools, tmp_path):
    path = build_tiny(tmp_path, "llama")

    def add_frequencies(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit_tensors(path, add_frequencies)
    assert pools(1).run(convert_ranks.load_that_fails, path=path, layout={}) == [None]


@pytest.mark.parametrize("count", [1, 0])
def test_layers_that_predict_further_tokens_are_left_out(pools, tmp_path, count):
    path = build_tiny(tmp_path, "deepseek_v3", num_hidden_layers=2, num_nextn_predict_layers=count)

    def add_a_layer(tensors):
        tensors["model.layers.2.eh_proj.weight"] = torch.ones(32, 64)

    edit_tensors(path, add_a_layer)
    errors = pools(2).run(convert_ranks.load_that_fails, path=path, layout=PP2)
    if count:
        assert errors == [None, None]
    else:
        assert all("first ['model.layers.2.eh_proj.weight']" in error for error in errors)


@pytest.mark.parametrize(("kind", "is_left_out"), [("qwen3_next", True), ("qwen3_moe", False)])
def test_layers_that_predict_further_tokens_may_be_apart(pools, tmp_path, kind, is_left_out):
    path = build_tiny(tmp_path, kind, num_hidden_layers=2)

    def add_a_layer(tensors):
        tensors["mtp.fc.weight"] = torch.ones(32, 64)

    edit_tensors(path, add_a_layer)
    (error,) = pools(1).run(convert_ranks.load_that_fails, path=path, layout={})
    assert error is None if is_left_out else "first ['mtp.fc.weight']" in error


def test_a_tied_output_in_the_files_has_to_be_the_embedding(pools, tmp_path):
    path = build_tiny(tmp_path, "llama", tied=True)

    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def differ(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    edit_tensors(path, repeat)
    layout = {"pipeline_model_parallel_size": 2}
    assert pools(2).run(convert_ranks.load_that_fails, path=path, layout=layout) == [None, None]
    edit_tensors(path, differ)
    for error in pools(2).run(convert_ranks.load_that_fails, path=path, layout=layout):
        assert "ties lm_head.weight to model.embed_tokens.weight" in error
        assert "different values" in error


def test_files_of_another_kind_are_refused(pools, tmp_path):
    path = build_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "model.bin")
    torch.save(load_file(tmp_path / "model.bin"), tmp_path / "pytorch_model.bin")
    (error,) = pools(1).run(convert_ranks.load_that_fails, path=path, layout={})
    assert "has no safetensors files" in error


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (convert_ranks.without_biases, "has no mapping for 2 of its parameters"),
        (
            convert_ranks.with_a_gate,
            "1 parameters that the model does not have, first ['decoder.layers.0.gate']",
        ),
    ],
)
def test_mappings_have_to_be_those_of_the_model(pools, tmp_path, edit, named):
    path = build_tiny(tmp_path, "qwen2")
    if edit is convert_ranks.without_biases:
        edit_tensors(path, lambda tensors: [tensors.pop(n) for n in list(tensors) if "bias" in n])
    layout = {"pipeline_model_parallel_size": 2}
    for error in pools(2).run(convert_ranks.load_that_fails, path=path, layout=layout, edit=edit):
        assert error.startswith("ValueError")
        assert named in error


def test_a_rank_that_cannot_read_fails_all(pools, tmp_path):
    path = build_tiny(tmp_path, "llama")
    errors = pools(2).run(convert_ranks.load_with_a_broken_rank, path=path)
    assert errors == ["RuntimeError: rank 1 failed: OSError: planted", "OSError: planted"]
