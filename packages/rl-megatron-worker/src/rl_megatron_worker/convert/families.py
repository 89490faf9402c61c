"""The supported model families, each as its difference from a plain Llama decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rl_megatron_worker.convert.mappings import LayerNames, decoder_mappings
from rl_megatron_worker.model.config import Architecture

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig

    from rl_megatron_worker.convert.mappings import Mapping
    from rl_megatron_worker.model.config import Fields

# Constants of Llama 3's RoPE scaling that `GPTModel` hard-codes.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Kinds of scaling whose frequencies do not depend on the tokens.
_FREQUENCIES = ("linear", "llama3", "yarn")
_SUPPORTED_SCALING = "'default' and " + ", ".join(map(repr, _FREQUENCIES))
# Families that rotate a part of each head; in others transformers rotates all of it regardless.
_PARTLY_ROTARY = ("glm4", "glm4_moe", "qwen3_next")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConverter:
    """Converts a family with Llama's parameter names, RMSNorm and SwiGLU MLPs."""

    family_fields: Callable[[PreTrainedConfig], Fields]
    """Returns the family's additional `TransformerConfig` fields, or raises `ValueError`."""
    names: LayerNames = field(default_factory=LayerNames)
    """How its checkpoints name what layers have."""
    rotary: Callable[[PreTrainedConfig], tuple[float, Fields]] = field(
        default_factory=lambda: _rotary
    )
    """Returns the base of rotary embeddings, and `GPTModel`'s arguments for their frequencies."""

    def architecture(self, hf_config: PreTrainedConfig) -> Architecture:
        """Return the Megatron-core architecture of a Hugging Face config.

        Raises:
            ValueError: `GPTModel` would compute other numbers under a setting of the config.
        """
        _require(hf_config, "hidden_act", "silu", "swish")
        _require(hf_config, "attention_dropout", 0.0, None)
        _require(hf_config, "quantization_config", None)
        theta, scaling = self.rotary(hf_config)
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
        return decoder_mappings(architecture, self.names)


def _plain_fields(hf_config: PreTrainedConfig) -> Fields:
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": _head_size(hf_config),
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


def _llama(hf_config: PreTrainedConfig) -> Fields:
    # Megatron-core supports biases in all linear layers, or in the QKV projection alone.
    _require(hf_config, "attention_bias", False)
    _require(hf_config, "mlp_bias", False)
    return {}


def _mistral(hf_config: PreTrainedConfig) -> Fields:
    return _windows(hf_config)


def _mixtral(hf_config: PreTrainedConfig) -> Fields:
    if hf_config.num_experts_per_tok == 1:
        # With one expert per token the renormalised probability is always 1.
        raise _refusal(hf_config, "num_experts_per_tok=1", "2 or more")
    return _windows(hf_config) | {
        "num_moe_experts": hf_config.num_local_experts,
        "moe_layer_freq": [1] * hf_config.num_hidden_layers,
        "moe_ffn_hidden_size": hf_config.intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        # A softmax over the top k, as a full softmax that is renormalised over them.
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
    }


def _gpt_oss(hf_config: PreTrainedConfig) -> Fields:
    # Biases of attention, routers and experts are one setting of Megatron-core.
    _require(hf_config, "attention_bias", True)
    fields = _mixtral(hf_config)
    return (
        fields
        | {
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "own_layers": True,
            "activation_func": partial(_swish, factor=hf_config.swiglu_alpha),
            "activation_func_clamp_value": hf_config.swiglu_limit,
            "glu_linear_offset": 1.0,
        }
        | _scaled_frequencies(hf_config)
    )


def _swish(gate: torch.Tensor, *, factor: float) -> torch.Tensor:
    return gate * torch.sigmoid(factor * gate)


def _scaled_frequencies(hf_config: PreTrainedConfig) -> Fields:
    """Return the fields of rotary embeddings that are scaled, the same in all layers.

    Raises:
        ValueError: The kind of scaling is not supported.
    """
    kind = hf_config.rope_parameters["rope_type"]
    if kind == "default":
        return {}
    if kind not in _FREQUENCIES:
        raise _refusal(hf_config, f"rope_type={kind!r}", _SUPPORTED_SCALING)
    # Their values are transformers' own.
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return {"rotary_frequencies": tuple(frequencies.tolist()), "rotary_scale": scale}


def _qwen2(hf_config: PreTrainedConfig) -> Fields:
    return {"add_qkv_bias": True} | _windows(hf_config)


def _qwen3(hf_config: PreTrainedConfig) -> Fields:
    _require(hf_config, "attention_bias", False)
    return {"qk_layernorm": True} | _windows(hf_config)


def _qwen2_moe(hf_config: PreTrainedConfig) -> Fields:
    fields = _qwen_experts(hf_config) | _gated_expert(hf_config)
    return {"add_qkv_bias": hf_config.qkv_bias} | _windows(hf_config) | fields


def _qwen3_moe(hf_config: PreTrainedConfig) -> Fields:
    return _qwen3(hf_config) | _qwen_experts(hf_config)


def _qwen3_next(hf_config: PreTrainedConfig) -> Fields:
    _require(hf_config, "attention_bias", False)
    linear = [int(kind == "linear_attention") for kind in hf_config.layer_types]
    others = {*hf_config.layer_types} - {"linear_attention", "full_attention"}
    if others:
        raise _refusal(
            hf_config, f"{min(others)!r} among its layer_types", "linear and full attention"
        )
    names = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads")
    sizes = [f"linear_{name}" for name in (*names, "num_value_heads")]
    return {
        "own_layers": True,
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "linear_attention_freq": linear,
        **{name: getattr(hf_config, name) for name in sizes},
    } | (_qwen_experts(hf_config) | _gated_expert(hf_config))


def _gated_expert(hf_config: PreTrainedConfig) -> Fields:
    """Return the fields of the expert that all tokens go to; empty without other experts."""
    if not _qwen_experts(hf_config):
        return {}
    return {
        "moe_shared_expert_intermediate_size": hf_config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def _qwen_experts(hf_config: PreTrainedConfig) -> Fields:
    """Return the fields of Qwen's mixtures of experts; empty without an expert."""
    num_chosen, renormalised = hf_config.num_experts_per_tok, hf_config.norm_topk_prob
    if num_chosen == 1 and renormalised:
        # With one expert per token the renormalised probability is always 1.
        raise _refusal(hf_config, "num_experts_per_tok=1 with norm_topk_prob=True", "False")
    dense, step = hf_config.mlp_only_layers, hf_config.decoder_sparse_step
    layers = range(hf_config.num_hidden_layers)
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]
    if not hf_config.num_experts or not any(pattern):
        return {}
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_layer_freq": pattern,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": num_chosen,
        # A softmax over the top k equals a full softmax, renormalised over the top k.
        "moe_router_pre_softmax": not renormalised,
        "moe_router_score_function": "softmax",
    }


def _glm4(hf_config: PreTrainedConfig) -> Fields:
    return {
        "add_qkv_bias": hf_config.attention_bias,
        "rotary_interleaved": True,
        "norm_after": True,
        "own_layers": True,
    }


def _glm4_moe(hf_config: PreTrainedConfig) -> Fields:
    return {
        "add_qkv_bias": hf_config.attention_bias,
        "qk_layernorm": hf_config.use_qk_norm,
    } | _biased_experts(hf_config)


def _deepseek_v2(hf_config: PreTrainedConfig) -> Fields:
    _require(hf_config, "mlp_bias", False)
    fields = _experts_after_dense(hf_config)
    if fields:
        _require(hf_config, "topk_method", "greedy", "group_limited_greedy")
        fields |= {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
        if hf_config.topk_method == "group_limited_greedy":
            fields |= _groups(hf_config, scores_per_group=1)
    return _latent_attention(hf_config) | fields


def _deepseek_v3(hf_config: PreTrainedConfig) -> Fields:
    _require(hf_config, "rope_interleave", True)
    return _latent_attention(hf_config) | _biased_experts(hf_config)


def _latent_attention(hf_config: PreTrainedConfig) -> Fields:
    """Return the fields of multi-head latent attention."""
    _require(hf_config, "attention_bias", False)
    _require(hf_config, "num_key_value_heads", hf_config.num_attention_heads)
    # transformers normalises latent vectors with its default, whatever the config has.
    _require(hf_config, "rms_norm_eps", 1e-6)
    size = hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim
    return {
        "multi_latent_attention": True,
        "own_layers": True,
        "kv_channels": size,
        "q_lora_rank": hf_config.q_lora_rank,
        "kv_lora_rank": hf_config.kv_lora_rank,
        "qk_head_dim": hf_config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
        "v_head_dim": hf_config.v_head_dim,
    } | _latent_rope(hf_config)


def _latent_rope(hf_config: PreTrainedConfig) -> Fields:
    """Return the fields of the rotary embeddings of latent attention.

    Raises:
        ValueError: Megatron-core does not support the kind of scaling.
    """
    parameters: Fields = hf_config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    if kind != "yarn":
        raise _refusal(hf_config, f"rope_type={kind!r}", "'default' and 'yarn'")
    for name, allowed in (("attention_factor", None), ("truncate", True)):
        if parameters.get(name, allowed) != allowed:
            raise _refusal(hf_config, f"{name}={parameters[name]}", f"{name}={allowed}")
    mscale, mscale_all_dim = (parameters.get(name) for name in ("mscale", "mscale_all_dim"))
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": parameters["factor"],
        "original_max_position_embeddings": parameters["original_max_position_embeddings"],
        "beta_fast": parameters.get("beta_fast") or 32.0,
        "beta_slow": parameters.get("beta_slow") or 1.0,
        # Without both, sines and cosines are scaled by what follows from the factor alone; the
        # second one scales the softmax too.
        "mscale": mscale if mscale_all_dim else None,
        "mscale_all_dim": mscale_all_dim or 0.0,
    }


def _theta(hf_config: PreTrainedConfig) -> tuple[float, Fields]:
    """Return the base of rotary embeddings that layers have themselves."""
    return hf_config.rope_parameters["rope_theta"], {}


def _olmo2(hf_config: PreTrainedConfig) -> Fields:
    _require(hf_config, "attention_bias", False)
    return {
        "norm_before": False,
        "norm_after": True,
        "norm_of_all_heads": True,
        "own_layers": True,
    }


def _olmo3(hf_config: PreTrainedConfig) -> Fields:
    return _olmo2(hf_config) | _windows(hf_config) | _rotary_fields(hf_config)


def _gemma2(hf_config: PreTrainedConfig) -> Fields:
    for name, supported in _GEMMA_SETTINGS.items():
        _require(hf_config, name, *supported)
    return {
        "norm_after": True,
        "own_layers": True,
        "layernorm_zero_centered_gamma": True,
        "activation_func": _gelu_of_tanh,
        "softmax_scale": hf_config.query_pre_attn_scalar**-0.5,
        "embedding_scale": hf_config.hidden_size**0.5,
        "attention_soft_cap": hf_config.attn_logit_softcapping,
        "logits_soft_cap": hf_config.final_logit_softcapping,
    } | _windows(hf_config)


def _gemma3(hf_config: PreTrainedConfig) -> Fields:
    return _gemma2(hf_config) | {"qk_layernorm": True} | _rotary_fields(hf_config)


def _gelu_of_tanh(gate: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh")


def _rotary_fields(hf_config: PreTrainedConfig) -> Fields:
    """Return the fields of rotary embeddings that differ between layers with windows and others.

    Raises:
        ValueError: A kind of scaling is not supported.
    """
    every: Fields = hf_config.rope_parameters
    full, window = every["full_attention"], every["sliding_attention"]
    if window["rope_type"] != "default":
        supported = "'default'"
        raise _refusal(hf_config, f"rope_type={window['rope_type']!r} in its windows", supported)
    fields: Fields = {"window_rotary_base": window["rope_theta"]}
    if full["rope_type"] == "default":
        return fields
    if full["rope_type"] not in _FREQUENCIES:
        raise _refusal(hf_config, f"rope_type={full['rope_type']!r}", _SUPPORTED_SCALING)
    # Their values are transformers' own.
    frequencies, scale = ROPE_INIT_FUNCTIONS[full["rope_type"]](
        hf_config, torch.device("cpu"), layer_type="full_attention"
    )
    return fields | {"rotary_frequencies": tuple(frequencies.tolist()), "rotary_scale": scale}


def _theta_of_full_layers(hf_config: PreTrainedConfig) -> tuple[float, Fields]:
    """Return the base of rotary embeddings in layers without a window."""
    return hf_config.rope_parameters["full_attention"]["rope_theta"], {}


def _biased_experts(hf_config: PreTrainedConfig) -> Fields:
    """Return the fields of experts chosen by sigmoids, with biases that balance them.

    They are DeepSeek-V3's (arXiv:2412.19437, section 2.1.2). Empty where all layers are dense.
    """
    if hf_config.num_experts_per_tok > 1:
        # Megatron-core renormalises sigmoids of two or more experts.
        _require(hf_config, "norm_topk_prob", True)
    else:
        _require(hf_config, "norm_topk_prob", False)
    fields = _experts_after_dense(hf_config)
    if fields:
        fields |= _groups(hf_config, scores_per_group=2) | {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            # The biases are those of the checkpoint: no gradient reaches them, and they stay.
            "moe_router_bias_update_rate": 0.0,
        }
    return fields


def _experts_after_dense(hf_config: PreTrainedConfig) -> Fields:
    """Return the fields of experts after the first layers; empty where all layers are dense."""
    num_layers, num_dense = hf_config.num_hidden_layers, hf_config.first_k_dense_replace
    if num_dense >= num_layers:
        return {}
    return {
        "num_moe_experts": hf_config.n_routed_experts,
        "moe_layer_freq": [int(layer >= num_dense) for layer in range(num_layers)],
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": (
            hf_config.moe_intermediate_size * hf_config.n_shared_experts
        ),
    }


def _groups(hf_config: PreTrainedConfig, *, scores_per_group: int) -> Fields:
    """Return the fields of routing to some groups of experts only; empty where it is to all."""
    if hf_config.n_group in (None, 1) or hf_config.topk_group == hf_config.n_group:
        return {}
    return {
        "moe_router_num_groups": hf_config.n_group,
        "moe_router_group_topk": hf_config.topk_group,
        "router_scores_per_group": scores_per_group,
    }


def _require(hf_config: PreTrainedConfig, name: str, *allowed: object) -> None:
    """Raise if `GPTModel` would compute a setting differently.

    Args:
        hf_config: The model's config. A missing setting passes.
        name: Name of the setting.
        allowed: The supported values.

    Raises:
        ValueError: The setting has another value.
    """
    value = getattr(hf_config, name, allowed[0])
    if value not in allowed:
        raise _refusal(hf_config, f"{name}={value!r}", f"{name}={allowed[0]!r}")


def _refusal(hf_config: PreTrainedConfig, setting: str, supported: str) -> ValueError:
    """Return the error that names a setting, and the supported value."""
    return ValueError(
        f"policy.model_name={hf_config.name_or_path!r}: its config ({hf_config.model_type}) has "
        f"{setting}, which Megatron-core's GPTModel does not compute; supported: {supported}"
    )


def _windows(hf_config: PreTrainedConfig) -> Fields:
    """Return the fields of sliding windows; empty where every layer sees all tokens before.

    Raises:
        ValueError: A layer attends in another way.
    """
    window = getattr(hf_config, "sliding_window", None)
    every = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(hf_config, "layer_types", None) or [every] * hf_config.num_hidden_layers
    if others := sorted({*kinds} - {"full_attention", "sliding_attention"}):
        raise _refusal(
            hf_config, f"{others[0]!r} among its layer_types", "full and sliding attention"
        )
    slides = [int(kind == "sliding_attention") for kind in kinds]
    if not any(slides):
        return {}
    if window is None:
        raise _refusal(hf_config, "sliding_attention with sliding_window=None", "a number")
    # Megatron-core counts the tokens before and after a token, without itself.
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": slides}


def _head_size(hf_config: PreTrainedConfig) -> int:
    """Return the size of an attention head."""
    given = getattr(hf_config, "head_dim", None)
    return given or hf_config.hidden_size // hf_config.num_attention_heads


def _rotary(hf_config: PreTrainedConfig) -> tuple[float, Fields]:
    """Return the RoPE base, and `GPTModel`'s arguments for scaled frequencies.

    Raises:
        ValueError: `GPTModel` does not support the kind of scaling.
    """
    parameters: Fields = hf_config.rope_parameters
    theta, kind = parameters["rope_theta"], parameters.get("rope_type", "default")
    partial = parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0 and not (kind == "default" and hf_config.model_type in _PARTLY_ROTARY):
        raise _refusal(hf_config, f"partial_rotary_factor={partial}", "1.0")
    if kind == "default":
        return theta, {} if partial == 1.0 else {"rotary_percent": partial}
    if kind == "linear":
        return theta, {"seq_len_interpolation_factor": parameters["factor"]}
    if kind != "llama3":
        raise _refusal(hf_config, f"rope_type={kind!r}", "'default', 'linear' and 'llama3'")
    for name, value in _LLAMA3.items():
        if parameters[name] != value:
            raise _refusal(
                hf_config, f"rope_type='llama3' with {name}={parameters[name]}", str(value)
            )
    return theta, {"rope_scaling": True, "rope_scaling_factor": parameters["factor"]}


_GEMMA_SETTINGS = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False, None),
}
_GEMMA = LayerNames(
    norm_after_attention="post_attention_layernorm",
    norm_before_mlp="pre_feedforward_layernorm",
    norm_after_mlp="post_feedforward_layernorm",
)
_OLMO = LayerNames(
    norm_after_attention="post_attention_layernorm", norm_after_mlp="post_feedforward_layernorm"
)
CONVERTERS = {
    "deepseek_v2": DecoderConverter(
        family_fields=_deepseek_v2, rotary=_theta, names=LayerNames(shared_expert="shared_experts")
    ),
    "deepseek_v3": DecoderConverter(
        family_fields=_deepseek_v3, rotary=_theta, names=LayerNames(shared_expert="shared_experts")
    ),
    "gemma2": DecoderConverter(family_fields=_gemma2, names=_GEMMA),
    "gemma3_text": DecoderConverter(
        family_fields=_gemma3, rotary=_theta_of_full_layers, names=_GEMMA
    ),
    "glm4": DecoderConverter(family_fields=_glm4, names=LayerNames(fused_mlp="gate_up_proj")),
    "glm4_moe": DecoderConverter(
        family_fields=_glm4_moe, names=LayerNames(shared_expert="shared_experts")
    ),
    "gpt_oss": DecoderConverter(
        family_fields=_gpt_oss,
        rotary=_theta,
        names=LayerNames(router="router", stacked_experts=True),
    ),
    "llama": DecoderConverter(family_fields=_llama),
    "mistral": DecoderConverter(family_fields=_mistral),
    "mixtral": DecoderConverter(
        family_fields=_mixtral,
        names=LayerNames(
            experts="block_sparse_moe", expert_gate="w1", expert_up="w3", expert_down="w2"
        ),
    ),
    "olmo2": DecoderConverter(family_fields=_olmo2, names=_OLMO),
    "olmo3": DecoderConverter(family_fields=_olmo3, rotary=_theta_of_full_layers, names=_OLMO),
    "qwen2": DecoderConverter(family_fields=_qwen2),
    "qwen2_moe": DecoderConverter(family_fields=_qwen2_moe),
    "qwen3": DecoderConverter(family_fields=_qwen3),
    "qwen3_moe": DecoderConverter(family_fields=_qwen3_moe),
    "qwen3_next": DecoderConverter(family_fields=_qwen3_next),
}
