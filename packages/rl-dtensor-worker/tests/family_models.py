"""Tiny models of families that transformers itself runs in a way of their own, on disk."""

import torch
from tiny_model import EOS, PAD, VOCAB_SIZE, build_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": PAD,
}

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
EXPERTS = {
    "mixtral": _EXPERTS,
    "minimax_m2": _EXPERTS | {"head_dim": 8, "rotary_dim": 4},
    "phimoe": _EXPERTS,
    "deepseek_v2": _LATENT | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "qwen3_moe": _EXPERTS | {"moe_intermediate_size": 16, "head_dim": 8},
    "gpt_oss": _EXPERTS | {"head_dim": 8},
}
"""Options of mixtures of experts, by `model_type`."""

_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
}
HYBRIDS = {
    "qwen3_next": _LINEAR | EXPERTS["qwen3_moe"] | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": _LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
    },
    "gptj": {"rotary_dim": 4},
}
"""Options of models with other blocks than dispatched attention that mix tokens."""


def build_family(path, model_type, **options):
    """Write a randomly initialised model of `model_type`, whose config has `options` besides.

    One-dimensional parameters are random too: their usual zeros and ones would hide faults.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | options)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)
