"""Models of many families whose heads differ, tiny, and made from a seed."""

import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)


class ShiftingLlama(LlamaForCausalLM):
    """Changes its logits in a way that no config key describes."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        shift = torch.arange(output.logits.shape[-1], device=output.logits.device) * 0.1
        output.logits = output.logits - shift
        return output


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "gemma3, soft cap": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"head_dim": 32, "final_logit_softcapping": 2.0, "sliding_window": 8},
    ),
    "cohere, scale": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "cohere2, scale": (Cohere2ForCausalLM, Cohere2Config, {"logit_scale": 0.5}),
    "granite, scale": (
        GraniteForCausalLM,
        GraniteConfig,
        {"logits_scaling": 4.0, "attention_multiplier": 0.125},
    ),
    "phi, bias": (PhiForCausalLM, PhiConfig, {"num_key_value_heads": 2}),
    "unknown": (ShiftingLlama, LlamaConfig, {}),
}


def build(name):
    """Return a model whose biases, too, are not zero."""
    model, config, options = FAMILIES[name]
    torch.manual_seed(0)
    built = model(config(**(SIZES | options)))
    with torch.no_grad():
        for parameter_name, parameter in built.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.5)
    return built.eval()
