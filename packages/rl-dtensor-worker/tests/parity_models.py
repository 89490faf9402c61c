"""One tiny model of each family that the parity table covers, on disk."""

import torch
from tiny_model import EOS, PAD, VOCAB_SIZE, build_tokenizer
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
_ODD = {"vocab_size": VOCAB_SIZE + 1}
_GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CONFIGS = {
    "llama": LlamaConfig(**_COMMON, tie_word_embeddings=False),
    # Of vocabularies of which two tensor-parallel ranks have unlike parts.
    "llama_tied": LlamaConfig(**_COMMON | _ODD, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_COMMON | _ODD, head_dim=16, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(**_COMMON, **_GEMMA3),
    "qwen3_moe": Qwen3MoeConfig(**_COMMON, **_EXPERTS, head_dim=16, decoder_sparse_step=1),
}


def build(name, path):
    """Write the model, with a tokenizer, to `path`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)
