"""Tiny models of transformers, the oracles, and their tensors as Megatron-core has them."""

import torch
import torch.nn.functional as F
from rl_megatron_worker.model.config import Architecture
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 61  # no multiple of two: tensor parallelism completes it
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}


def build_reference(kind, *, seed=0, num_layers=4):
    """Return a float32 model with norms of heads: `dense`, `tied`, or `moe`."""
    torch.manual_seed(seed)
    sizes = {**_SIZES, "num_hidden_layers": num_layers, "tie_word_embeddings": kind == "tied"}
    if kind != "moe":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model.eval()


def architecture_of(model):
    config = model.config
    fields = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if hasattr(config, "num_experts"):
        fields |= {
            "num_moe_experts": config.num_experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
        }
    return Architecture(
        transformer=fields,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        tied_embeddings=config.tie_word_embeddings,
        rotary_base=config.rope_parameters["rope_theta"],
    )


def shard_of(name, tensors, config, *, tp, etp, ep):
    """Return a parameter of Megatron-core, cut for `(rank, size)` pairs, from whole tensors.

    Args:
        name: With the global number of the layer.
        tensors: transformers' tensors by name: parameters or their gradients.
        config: transformers' config.
        tp: Rank and size of tensor parallelism.
        etp: The same within experts.
        ep: The same of expert parallelism.
    """
    if name == "embedding.word_embeddings.weight":
        return _vocabulary_part(tensors["model.embed_tokens.weight"], tp)
    if name == "output_layer.weight":
        tied = "lm_head.weight" not in tensors
        return _vocabulary_part(
            tensors["model.embed_tokens.weight" if tied else "lm_head.weight"], tp
        )
    if name == "decoder.final_layernorm.weight":
        return tensors["model.norm.weight"]
    _, _, layer, rest = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    if rest == "self_attention.linear_qkv.weight":
        return _part(_interleave_heads(tensors, prefix, config), 0, tp)
    if rest == "mlp.linear_fc1.weight":
        gate, up = (tensors[f"{prefix}mlp.{each}_proj.weight"] for each in ("gate", "up"))
        return torch.cat([_part(gate, 0, tp), _part(up, 0, tp)])
    if rest.startswith("mlp.experts.local_experts."):
        expert = int(rest.split(".")[3]) + ep[0] * config.num_experts // ep[1]
        if rest.endswith("linear_fc2.weight"):
            return _part(tensors[f"{prefix}mlp.experts.down_proj"][expert], 1, etp)
        gate, up = tensors[f"{prefix}mlp.experts.gate_up_proj"][expert].chunk(2)
        return torch.cat([_part(gate, 0, etp), _part(up, 0, etp)])
    whole, dim = {
        "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
        "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
        "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
        "input_layernorm.weight": ("input_layernorm.weight", None),
        "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
        "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
        "mlp.router.weight": ("mlp.gate.weight", None),
    }[rest]
    tensor = tensors[prefix + whole]
    return tensor if dim is None else _part(tensor, dim, tp)


def _interleave_heads(tensors, prefix, config):
    """Return the heads of each query group, with its key and value behind them."""
    groups, size = config.num_key_value_heads, config.head_dim
    parts = [
        tensors[f"{prefix}self_attn.{each}_proj.weight"].view(groups, -1, size, config.hidden_size)
        for each in "qkv"
    ]
    return torch.cat(parts, dim=1).flatten(0, 2)


def _vocabulary_part(tensor, tp):
    return _part(F.pad(tensor, (0, 0, 0, -len(tensor) % tp[1])), 0, tp)


def _part(tensor, dim, cut):
    rank, size = cut
    return tensor.chunk(size, dim)[rank]
