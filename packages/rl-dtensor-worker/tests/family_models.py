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
