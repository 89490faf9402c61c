"""A tiny random model of each causal language model type that transformers has.

Sizes are small and unlike each other, windows shorter than the rows, and each kind of layer that a
type has occurs. Parameters that a fresh model has at 0 or 1, such as norms and biases, are random,
as their usual values would hide faults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

# Odd, so that two tensor-parallel ranks have parts of unlike size.
VOCAB_SIZE = 65
PAD, EOS = 0, 1
_MAX_PARAMETERS = 3_000_000

Options = dict[str, Any]

_EVERYWHERE: Options = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": PAD,
}
# Where a type's own config has such an option, and not None.
_WHERE_PRESENT: Options = {
    "initializer_range": 0.3,
    "init_std": 0.3,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 4,
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
    "mamba_dt_rank": 4,
    "state_size": 8,
    "ssm_state_size": 8,
    "time_step_rank": 4,
    "chunk_size": 4,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "n_inner": 48,
    "dff": 48,
    "attention_chunk_size": 4,
}
# Of what reads images or sound, where present.
_PART: Options = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "depth": 1,
}
# Names of the option that says each layer's kind.
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")
_ROPE: Options = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT: Options = {"num_key_value_heads": 4}
_ENCODER_DECODER: Options = {
    "d_model": 32,
    "decoder_layers": 2,
    "encoder_layers": 1,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "is_decoder": True,
    "is_encoder_decoder": False,
}
_DECODER: Options = {"is_decoder": True}
_HYBRID_QWEN: Options = {"layer_types": ["linear_attention", "full_attention"]}

_TYPES: dict[str, Options] = {
    "axk1": _LATENT,
    "axk2": _LATENT | {"mlp_layer_types": ["dense", "sparse"], "n_group": None, "topk_group": None},
    "bamba": {"attn_layer_indices": [1]},
    "bart": _ENCODER_DECODER,
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "big_bird": _DECODER | {"attention_type": "original_full"},
    "bigbird_pegasus": _ENCODER_DECODER | {"attention_type": "original_full"},
    "blenderbot": _ENCODER_DECODER,
    "blenderbot-small": _ENCODER_DECODER,
    "bloom": {"n_layer": 2, "n_head": 4},
    "camembert": _DECODER,
    "codegen": {"rotary_dim": 4, "n_head": 4, "n_embd": 32, "n_layer": 2, "n_ctx": 64},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]}
    | {"head_dim": 128}
    | {"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE)},
    "cpmant": {
        "dim_head": 8,
        "dim_ff": 48,
        "prompt_types": 4,
        "prompt_length": 4,
        "segment_types": 4,
    },
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 64},
    "data2vec-text": _DECODER,
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "deepseek_v2": _LATENT
    | {"topk_method": "group_limited_greedy", "n_group": 2}
    | {"topk_group": 1, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {"num_key_value_heads": 1},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16, "num_key_value_heads": 4},
    "electra": _DECODER | {"embedding_size": 32},
    "ernie": _DECODER,
    "falcon": {"head_dim": None, "num_kv_heads": 2, "ffn_hidden_size": 48}
    | {"new_decoder_architecture": True},
    "falcon (alibi)": {"head_dim": None, "ffn_hidden_size": 48, "alibi": True},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {"per_layer_config": {}},
    "gemma4_unified_text": {"per_layer_config": {}},
    "glm4_moe_lite": _LATENT | {"mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": _LATENT | {"mlp_layer_types": ["dense", "sparse"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4, "num_layers": 2}
    | {"num_heads": 4},
    "gptj": {"rotary_dim": 4, "n_head": 4, "n_embd": 32, "n_layer": 2},
    "granitemoehybrid": {"layers_block_type": ["mamba", "attention"]},
    # Larger weights, applied over and over, amplify rounding.
    "hrm_text": {"initializer_range": 0.1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "kimi_linear": _LATENT
    | {"num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": _LATENT
    | {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "num_layers": 2}
    | {"zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "marian": _ENCODER_DECODER,
    "mbart": _ENCODER_DECODER,
    "megatron-bert": _DECODER,
    "minicpm3": _LATENT,
    "ministral": {"head_dim": 8},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "minimax_m2": {"rotary_dim": 4},
    "mvp": _ENCODER_DECODER,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "num_hidden_layers": None,
    },
    "olmo_hybrid": {"linear_num_key_heads": 4, "linear_num_value_heads": 4} | _HYBRID_QWEN,
    "pegasus": _ENCODER_DECODER,
    "plbart": _ENCODER_DECODER,
    "prophetnet": {
        "num_hidden_layers": None,
        "num_encoder_layers": 1,
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4,
        "num_encoder_attention_heads": 4,
        "is_decoder": True,
        "is_encoder_decoder": False,
    },
    "qwen2_moe": {"decoder_sparse_step": 1},
    "qwen3_5_moe_text": _HYBRID_QWEN,
    "qwen3_5_text": _HYBRID_QWEN,
    "qwen3_next": _HYBRID_QWEN,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
    },
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 4, "num_hidden_layers": 3},
    "reformer": _DECODER | {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "rembert": _DECODER | {"input_embedding_size": 16, "output_embedding_size": 16},
    "roberta": _DECODER,
    "roberta-prelayernorm": _DECODER,
    "roc_bert": _DECODER
    | {"pronunciation_vocab_size": 16, "shape_vocab_size": 16}
    | {"pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "roformer": _DECODER | {"embedding_size": 32},
    "rwkv": {"attention_hidden_size": 32},
    "trocr": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4},
    "whisper": _ENCODER_DECODER | {"max_target_positions": 64},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4},
    "xlm-roberta": _DECODER,
    "xlm-roberta-xl": _DECODER,
    "xmod": _DECODER | {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": _LATENT | {"embedding_initializer_range": 0.3},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "kv_channels": 8,
        "num_query_groups": 4,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "adapter_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16}
    | {"layer_types": ["hybrid", "hybrid"]},
}
"""Options of a type beside the ones above; None leaves one out."""


def all_types() -> list[str]:
    """Return every model type that transformers has a causal language model of, and variants."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_TYPES})


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a small config of a type.

    Raises:
        ValueError: Its own config refuses the sizes.
    """
    options = _TYPES.get(model_type, {})
    # A variant has what it is one of in brackets.
    model_type = model_type.partition(" ")[0]
    own = CONFIG_MAPPING[model_type]().to_dict()
    present = {k: v for k, v in _WHERE_PRESENT.items() if own.get(k) is not None}
    options = _EVERYWHERE | present | _kinds(own) | _parts(own) | options
    return AutoConfig.for_model(model_type, **{k: v for k, v in options.items() if v is not None})


def build(model_type: str, directory: Path) -> None:
    """Write a random model of a type and its tokenizer to `directory`.

    Raises:
        ValueError: No small one can be built.
    """
    config = tiny_config(model_type)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in empty.parameters())
    if count > _MAX_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            is_correction = name.endswith("e_score_correction_bias")
            if is_correction or (tensor.ndim == 1 and isinstance(tensor, torch.nn.Parameter)):
                tensor.add_(0.1 * torch.randn_like(tensor))
        for module in model.modules():
            # A row of zeros would tie all routers and indexers of its token. transformers sets
            # Youtu's to zero as it loads it.
            is_embedding = isinstance(module, torch.nn.Embedding) and model_type != "youtu"
            if is_embedding and module.padding_idx is not None:
                module.weight[module.padding_idx].normal_(0.0, 0.3)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token `i` is the character `chr(62 + i)`; 0 pads and 1 ends."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {chr(62 + i): i for i in range(2, VOCAB_SIZE)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def _kinds(own: Options) -> Options:
    """Return one layer of each kind that a type has, where its config has such an option."""
    each = {name: list(dict.fromkeys(own[name])) for name in _KINDS if own.get(name)}
    count = max([2, *(len(kinds) for kinds in each.values())])
    found: Options = {name: (kinds * count)[:count] for name, kinds in each.items()}
    return found | {"num_hidden_layers": count}


def _parts(own: Options) -> Options:
    """Return small configs of the parts of a type that reads more than text."""
    found: Options = {}
    for name, part in own.items():
        if name == "text_config" and isinstance(part, dict):
            found[name] = tiny_config(part["model_type"]).to_dict()
        elif name in ("vision_config", "audio_config") and isinstance(part, dict):
            found[name] = part | {k: v for k, v in _PART.items() if part.get(k) is not None}
    return found
