"""Module specs of the transformer layers: Transformer Engine's, or local ones for every device."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import nn

from rl_megatron_worker.attention.local import PackedAttention


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def fits_transformer_engine(dtype: torch.dtype, *, on_cuda: bool) -> bool:
    """Return whether Transformer Engine supports layers of this dtype.

    It needs a GPU, and its attention over packed sequences ("thd") is 16-bit only: neither flash
    nor fused attention supports float32, and its unfused attention does not support thd.
    """
    return on_cuda and dtype in (torch.bfloat16, torch.float16)


def block_spec(
    config: TransformerConfig, *, vp_stage: int | None, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """Return the layer specs of a model chunk of this rank.

    Args:
        config: Megatron-core's config of the model.
        vp_stage: The virtual pipeline stage; None without interleaving.
        transformer_engine: Whether to use Transformer Engine's modules instead of local ones.
    """
    if transformer_engine:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [
        _layer_spec(config, num_experts=config.num_moe_experts if is_moe else None)
        for is_moe in _layers_with_experts(config)[first : first + num_layers]
    ]
    norm: Any = RMSNorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


class RMSNorm(nn.Module):
    """RMSNorm that supports sequence parallelism, which Megatron-core's `WrappedTorchNorm` refuses.

    The weight's gradient has to be all-reduced over the sequence shards: Megatron-core does so for
    parameters with the attribute `sequence_parallel`.

    Args:
        config: Megatron-core's config of the model.
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.
        unused: Arguments of other normalisations.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> None:
        super().__init__()
        assert config.normalization == "RMSNorm", config.normalization
        assert not config.layernorm_zero_centered_gamma, "the weight is the factor itself"
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normalised `hidden`, `[..., hidden_size]`."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class _LocalModules(LocalSpecProvider):
    """Megatron-core's local modules, with our attention and normalisation."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """Return the normalisation layer."""
        return RMSNorm

    def core_attention(self) -> type:
        """Return the attention module."""
        return PackedAttention


def _layer_spec(config: TransformerConfig, *, num_experts: int | None) -> ModuleSpec:
    modules = _LocalModules()
    norm_of_heads = modules.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=modules.column_parallel_linear(),
        core_attention=modules.core_attention(),
        linear_proj=modules.row_parallel_linear(),
        q_layernorm=norm_of_heads,
        k_layernorm=norm_of_heads,
    )
    # Annotated as a module, but Megatron-core passes functions too.
    add_residual: Any = get_bias_dropout_add
    # Transformer Engine's names of the same weights: checkpoints are interchangeable between both
    # kinds of layers. Extra states of its modules are dropped, see `without_extra_states`.
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if num_experts is None:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.layer_norm(),
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention,
            ),
            self_attn_bda=add_residual,
            pre_mlp_layernorm=modules.layer_norm(),
            mlp=get_mlp_module_spec_for_backend(backend=modules, num_experts=num_experts),
            mlp_bda=add_residual,
            sharded_state_dict_keys_map=names,
        ),
    )


def _layers_with_experts(config: TransformerConfig) -> list[bool]:
    """Return for every layer of the model whether it is an MoE layer."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(config.num_layers)]
    return [bool(each) for each in frequency]
