"""What a vLLM engine holds on each device, from the model's config and vLLM's own arithmetic.

vLLM takes `gpu_memory_utilization` of the device. Weights and a forward pass of the longest batch
come first, and what is left is the key-value cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_policy.generation.vllm.config import EngineConfig
from rl_policy.planning.result import EngineShare

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
# vLLM's `max_num_batched_tokens` for `LLM` on a device of 70 GiB or more, else half of it.
_BATCHED_TOKENS = 16384
# Logits in float32, and their log-probabilities beside them.
_LOGIT_COPIES = 2
_STEP = 0.05


def share_of_engine(
    engine: EngineConfig,
    model_config: PreTrainedConfig,
    model: nn.Module,
    *,
    memory: int,
    reserve: int,
    beside: int,
) -> EngineShare:
    """Return what an engine holds on a device.

    Args:
        engine: The section `vllm_cfg`.
        model_config: The model's config.
        model: The full model, on the meta device.
        memory: Bytes of the device.
        reserve: Bytes of it that no tensor has.
        beside: Bytes of the policy that stay while the engine samples.
    """
    text = model_config.get_text_config()
    size, ranks = _BYTES[engine.precision], engine.tensor_parallel_size
    weights = weight_bytes(model, itemsize=size, ranks=ranks)
    activations = _activation_bytes(text, engine, itemsize=size)
    per_token = cache_bytes_per_token(model_config, itemsize=size, ranks=ranks)
    limit = int(memory * engine.gpu_memory_utilization)
    given = engine.kv_cache_memory_bytes
    cache = max(0, limit - weights - activations) if given is None else given
    longest = engine.max_model_len or getattr(text, "max_position_embeddings", 1)
    tokens = cache // per_token
    best = math.floor((memory - reserve - beside) / memory / _STEP) * _STEP
    return EngineShare(
        weights_bytes=weights,
        activation_bytes=activations,
        cache_bytes=cache,
        cache_tokens=tokens,
        cache_rows=tokens / longest,
        longest=longest,
        is_colocated=engine.is_colocated,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        best_utilization=round(max(0.0, best), 2),
    )


def weight_bytes(model: nn.Module, *, itemsize: int, ranks: int) -> int:
    """Return the bytes of one rank's weights: matrices are sharded, vectors replicated."""
    shards = (
        -(-each.numel() // ranks) if each.ndim > 1 else each.numel() for each in model.parameters()
    )
    return itemsize * sum(shards)


def cache_bytes_per_token(config: PreTrainedConfig, *, itemsize: int, ranks: int) -> int:
    """Return the bytes of a token's keys and values in all layers, on one rank.

    Example, Llama 3 70B in bfloat16 on 8 ranks, with one of 8 heads of 128 each:
        2 * 80 layers * 1 head * 128 * 2 bytes = 40960
    """
    text: Any = config.get_text_config()
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        # Multi-head latent attention: one vector for all heads, on every rank.
        width = latent + getattr(text, "qk_rope_head_dim", 0)
    else:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        width = 2 * -(-heads // ranks) * head_size
    return text.num_hidden_layers * width * itemsize


def _activation_bytes(text: Any, engine: EngineConfig, *, itemsize: int) -> int:
    """Estimate what a forward pass of the largest batch takes: an MLP, experts, or the logits."""
    given: Mapping[str, object] = engine.engine_kwargs
    tokens = int(str(given.get("max_num_batched_tokens", _BATCHED_TOKENS)))
    inner = 2 * getattr(text, "intermediate_size", 4 * text.hidden_size)
    width, ranks = text.hidden_size, engine.tensor_parallel_size
    # Its input, its output and the residual stream beside it.
    mlp = tokens * (3 * width + inner // ranks) * itemsize
    # vLLM's fused kernel has rows of both products and of the activation for each chosen expert.
    expert = (getattr(text, "moe_intermediate_size", None) or inner // 2) // ranks
    chosen = getattr(text, "num_experts_per_tok", None) or 0
    mlp += tokens * chosen * (max(2 * expert, width) + expert) * itemsize
    logits = _LOGIT_COPIES * engine.max_num_seqs * text.vocab_size * 4
    return max(mlp, logits)
