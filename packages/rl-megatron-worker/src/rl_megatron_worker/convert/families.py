"""The supported model families, each as its difference from a plain Llama decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from rl_megatron_worker.convert.decoder import decoder_mappings
from rl_megatron_worker.convert.settings import (
    head_size,
    refusal,
    require,
    require_full_attention,
    rotary,
)
from rl_megatron_worker.model.config import Architecture

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_megatron_worker.convert.mappings import Mapping

Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConverter:
    """Converts a family with Llama's parameter names, RMSNorm and SwiGLU MLPs."""

    family_fields: Callable[[Any], Fields]
    """Returns the family's additional `TransformerConfig` fields, or raises `ValueError`."""

    def architecture(self, hf_config: Any) -> Architecture:
        """Return the Megatron-core architecture of a Hugging Face config.

        Raises:
            ValueError: `GPTModel` would compute other numbers under a setting of the config.
        """
        require(hf_config, "hidden_act", "silu", "swish")
        require(hf_config, "attention_dropout", 0.0, None)
        require(hf_config, "quantization_config", None)
        theta, scaling = rotary(hf_config)
        return Architecture(
            transformer=_plain_fields(hf_config) | self.family_fields(hf_config),
            vocab_size=hf_config.vocab_size,
            max_sequence_length=hf_config.max_position_embeddings,
            tied_embeddings=hf_config.tie_word_embeddings,
            rotary_base=theta,
            rotary_scaling=scaling,
        )

    def mappings(self, architecture: Architecture) -> list[Mapping]:
        """Return the mapping of every parameter from Hugging Face tensors."""
        return decoder_mappings(architecture)


def _plain_fields(hf_config: Any) -> Fields:
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": head_size(hf_config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _llama(hf_config: Any) -> Fields:
    # Megatron-core supports biases in all linear layers, or in the QKV projection alone.
    require(hf_config, "attention_bias", False)
    require(hf_config, "mlp_bias", False)
    return {}


def _qwen2(hf_config: Any) -> Fields:
    require_full_attention(hf_config)
    return {"add_qkv_bias": True}


def _qwen3(hf_config: Any) -> Fields:
    require(hf_config, "attention_bias", False)
    require_full_attention(hf_config)
    return {"qk_layernorm": True}


def _qwen3_moe(hf_config: Any) -> Fields:
    fields = _qwen3(hf_config)
    num_chosen, renormalised = hf_config.num_experts_per_tok, hf_config.norm_topk_prob
    if num_chosen == 1 and renormalised:
        # With one expert per token the renormalised probability is always 1.
        raise refusal(hf_config, "num_experts_per_tok=1 with norm_topk_prob=True", "False")
    dense, step = hf_config.mlp_only_layers, hf_config.decoder_sparse_step
    layers = range(hf_config.num_hidden_layers)
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]
    if not hf_config.num_experts or not any(pattern):
        return fields
    return fields | {
        "num_moe_experts": hf_config.num_experts,
        "moe_layer_freq": pattern,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": num_chosen,
        # A softmax over the top k equals a full softmax, renormalised over the top k.
        "moe_router_pre_softmax": not renormalised,
        "moe_router_score_function": "softmax",
    }


CONVERTERS = {
    "llama": DecoderConverter(family_fields=_llama),
    "qwen2": DecoderConverter(family_fields=_qwen2),
    "qwen3": DecoderConverter(family_fields=_qwen3),
    "qwen3_moe": DecoderConverter(family_fields=_qwen3_moe),
}
