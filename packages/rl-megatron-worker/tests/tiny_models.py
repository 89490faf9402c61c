"""Tiny models of the families that are converted, on disk, each with a tokenizer."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

# No multiple of 4, nor of 8: tensor parallelism has to complete it.
VOCAB_SIZE = 66
PAD, EOS = 0, 1

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
# Heads that are not the hidden size cut into equal parts.
_WIDE_HEADS = {"head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_EXPERTS_AFTER_DENSE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-6,
}

# Both kinds of layers, and caps that scores reach.
_GEMMA = {
    **_WIDE_HEADS,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 24,
}

KINDS = {
    "deepseek_v2": (
        DeepseekV2Config,
        {**_LATENT, **_EXPERTS_AFTER_DENSE, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (DeepseekV3Config, {**_LATENT, **_EXPERTS_AFTER_DENSE}),
    "gemma2": (
        Gemma2Config,
        {**_GEMMA, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3_text": (Gemma3TextConfig, _GEMMA),
    "glm4": (Glm4Config, {**_WIDE_HEADS, "attention_bias": True}),
    "glm4_moe": (
        Glm4MoeConfig,
        {**_WIDE_HEADS, **_EXPERTS_AFTER_DENSE, "attention_bias": True, "use_qk_norm": True},
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            **_WIDE_HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            # Reached by some gates and some of what they multiply.
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 8,
                "truncate": False,
            },
        },
    ),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {**_WIDE_HEADS, "sliding_window": None}),
    "mixtral": (
        MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "olmo2": (Olmo2Config, {}),
    "olmo3": (
        Olmo3Config,
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "qwen2": (Qwen2Config, {}),
    "qwen2_moe": (Qwen2MoeConfig, {**_EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3": (Qwen3Config, _WIDE_HEADS),
    "qwen3_moe": (Qwen3MoeConfig, {**_WIDE_HEADS, **_EXPERTS, "norm_topk_prob": True}),
    "qwen3_next": (
        Qwen3NextConfig,
        {
            **_WIDE_HEADS,
            **_EXPERTS,
            "shared_expert_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            # With 1e-5 four layers multiply rounding: in transformers itself, chunks of 8 tokens
            # in place of 64 change the norm of later gradients by 1e-3. With this, by 1e-6.
            "rms_norm_eps": 1e-2,
        },
    ),
}
WITH_EXPERTS = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
)


def tiny_config(kind, *, tied=False, **settings):
    """Return the config of a tiny model; `settings` take precedence over its own."""
    config_class, own = KINDS[kind]
    options = {**_SIZES, **own, "tie_word_embeddings": tied, **settings}
    if options.get("layer_types"):
        options["layer_types"] = options["layer_types"][: options["num_hidden_layers"]]
    return config_class(**options)


def build_tiny(path, kind, *, tied=False, seed=0, dtype=torch.float32, **settings):
    """Write a model whose every parameter, norms and biases too, is random; return the path."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, tied=tied, **settings))
    biases = [each for each in model.named_buffers() if each[0].endswith("correction_bias")]
    for name, parameter in (*model.named_parameters(), *biases):
        # These norms add 1 themselves; that of linear attention does not.
        adds_one = kind.startswith(("gemma", "qwen3_next")) and "linear_attn" not in name
        mean = 1.0 if "norm" in name and not adds_one else 0.0
        torch.nn.init.normal_(parameter, mean=mean, std=0.15)
    model.to(dtype).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)


def build_tokenizer():
    """Token `i` is the character `chr(62 + i)`; 0 pads and 1 ends."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {chr(62 + i): i for i in range(2, VOCAB_SIZE)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
