"""Tiny models of several architectures on disk, as transformers saves them."""

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SIZES = {
    "vocab_size": 66,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_WITHOUT_HEAD_DIM = {name: size for name, size in _SIZES.items() if name != "head_dim"}

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_WITHOUT_HEAD_DIM)),
    "qwen2_tied": lambda: Qwen2ForCausalLM(
        Qwen2Config(**_WITHOUT_HEAD_DIM, tie_word_embeddings=True)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, sliding_window=8)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **_EXPERTS)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=3)),
}


def save_model(path, name, *, dtype=torch.float32, **options):
    """Write a randomly initialised model, norms and biases included, and return the path."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.to(dtype).save_pretrained(path, **options)
    return str(path)


def edit_tensors(path, edit):
    """Let `edit` change the tensors of a checkpoint of one file, in place."""
    file = f"{path}/model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return str(path)
