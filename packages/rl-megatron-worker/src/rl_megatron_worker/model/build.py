"""This rank's chunks of the model: Megatron-core's `GPTModel`, one per virtual pipeline stage.

Layers are Transformer Engine's modules, or local ones that run on every device. The output layer is
replaced, under its own name and with its own parameter, by one that returns its input
(`OutputMatrix`): `heads` scores tokens from hidden states without materialising all logits.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import nn

from rl_megatron_worker.attention import PackedAttention
from rl_megatron_worker.compat.versions import experts_spec, query_norms_allowed
from rl_megatron_worker.model.config import padded_vocab_size, uses_transformer_engine
from rl_megatron_worker.model.experts import (
    ExpertOutput,
    GroupedExperts,
    expert_layers,
    prepare_routers,
)
from rl_megatron_worker.model.latent_attention import LatentAttention
from rl_megatron_worker.model.layers import (
    GatedAttention,
    NormOfAllKeys,
    NormOfAllQueries,
    NormThenAdd,
    RMSNorm,
    WindowRotaryAttention,
    sharded_weight,
)
from rl_megatron_worker.model.linear_attention import GatedDeltaNet

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from rl_megatron_worker.model.config import Architecture, DecoderConfig
    from rl_megatron_worker.parallel.groups import MegatronLayout
    from rl_megatron_worker.runtime import Runtime


# What a token dispatcher keeps of its last forward pass.
_ROUTING = ("probs", "routing_map", "reversed_local_input_permutation_mapping")

# Tensors of rotary embeddings that Megatron-core moves to the device when it needs them.
_FREQUENCIES = ("inv_freq", "inv_freq_extra", "inv_freq_inter")


def build_model(
    architecture: Architecture,
    config: DecoderConfig,
    layout: MegatronLayout,
    runtime: Runtime,
    *,
    ddp: DistributedDataParallelConfig | None,
    freezes_routers: bool = False,
) -> list[nn.Module]:
    """Return the chunks of this rank, one per virtual stage. Collective.

    Parameters are left uninitialised; load them with `load_weights`.

    Args:
        architecture: The model's architecture.
        config: From `transformer_config`.
        layout: The parallel layout.
        runtime: Device and scope of this rank.
        ddp: Gradient reduction; None for a model that is not trained.
        freezes_routers: Whether the routers of experts are not trained.
    """
    stages = [None] if layout.virtual_stages is None else range(layout.virtual_stages)
    with runtime.scope():
        chunks: list[nn.Module] = []
        for index, vp_stage in enumerate(stages):
            chunk: nn.Module = _build_chunk(architecture, config, layout, runtime, vp_stage)
            # Megatron-core makes the weight of MoE routers on the CPU.
            chunk.to(runtime.device)
            if config.fp16 or config.bf16:
                chunk = Float16Module(config, chunk)
            prepare_routers(chunk, config)
            if freezes_routers:
                # Before the gradient buffers are made, which have no room for them then.
                for layer in expert_layers(chunk):
                    cast("nn.Module", layer.router).requires_grad_(False)
            if ddp is None:
                chunk.requires_grad_(False)
            else:
                # As in Megatron-LM: buckets only for the first chunk, whose backward pass is last:
                # no other chunk's compute hides its reduction.
                chunk = DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
            chunks.append(chunk)
    return chunks


def _build_chunk(
    architecture: Architecture,
    config: DecoderConfig,
    layout: MegatronLayout,
    runtime: Runtime,
    vp_stage: int | None,
) -> GPTModel:
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    engine = uses_transformer_engine(runtime, config)
    spec = _block_spec(config, vp_stage, transformer_engine=engine)
    has_own_norms = config.multi_latent_attention or config.norm_of_all_heads
    with query_norms_allowed(config) if has_own_norms else nullcontext():
        model = GPTModel(
            config=config,
            # Annotated as a layer's spec and an int; it takes a block's spec and a float.
            transformer_layer_spec=spec,  # type: ignore[arg-type]
            vocab_size=padded_vocab_size(architecture, layout),
            max_sequence_length=architecture.max_sequence_length,
            pre_process=is_first,
            post_process=is_last,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=architecture.rotary_base,  # type: ignore[arg-type]
            vp_stage=vp_stage,
            **architecture.rotary_scaling,
        )
    if config.rotary_frequencies is not None:
        frequencies = torch.tensor(config.rotary_frequencies, device=runtime.device)
        model.rotary_pos_emb.inv_freq = frequencies
    if is_first and config.embedding_scale != 1.0:
        model.embedding.register_forward_hook(partial(_scaled, factor=config.embedding_scale))
    if is_last:
        head = OutputMatrix(
            model.output_layer,
            vocab_size=architecture.vocab_size,
            soft_cap=config.logits_soft_cap,
        )
        model.output_layer = head  # type: ignore[assignment]
    return model


def _scaled(_: nn.Module, __: object, embedded: torch.Tensor, *, factor: float) -> torch.Tensor:
    """Return embeddings times a factor in their dtype, as models have it."""
    return embedded * torch.tensor(factor, dtype=embedded.dtype, device=embedded.device)


def unwrapped(chunk: nn.Module) -> GPTModel:
    """Return the `GPTModel` of a chunk."""
    while not isinstance(chunk, GPTModel):
        chunk = cast("nn.Module", chunk.module)
    return chunk


def rotary_embeddings(chunk: nn.Module) -> list[RotaryEmbedding]:
    """Return the rotary embeddings of a chunk: one, or one of each layer with latent attention."""
    return [module for module in chunk.modules() if isinstance(module, RotaryEmbedding)]


def release_caches(chunks: Sequence[nn.Module]) -> None:
    """Free what Megatron-core caches on the device; the next forward makes it again.

    These are the rotary embeddings of the last 32 sequence lengths, the buffer into which sequence
    parallelism gathers activations, the last activations from the stage before this one, and how
    each MoE layer has routed its last tokens.
    """
    parallel_state.get_global_memory_buffer().buffer.clear()
    # Set in every forward pass: the scale of the load-balancing loss.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    for chunk in chunks:
        unwrapped(chunk).set_input_tensor(None)  # type: ignore[arg-type]
        for rotary in rotary_embeddings(chunk):
            # Of the class: the cache holds the embeddings of all of its instances.
            type(rotary).forward.cache_clear()
            for name in _FREQUENCIES:
                if hasattr(rotary, name):
                    setattr(rotary, name, getattr(rotary, name).cpu())
        for layer in expert_layers(chunk):
            for name in _ROUTING:
                if hasattr(layer.token_dispatcher, name):
                    setattr(layer.token_dispatcher, name, None)


class OutputMatrix(nn.Module):
    """An output layer that returns its input; the scores multiply it with the weight.

    It has to stay a module that is called: with `overlap_param_gather` the forward hook of data
    parallelism waits for the all-gather of the weight.

    Args:
        layer: The layer whose weight it takes.
        vocab_size: Number of tokens, without padding.
        soft_cap: Bound on the logits: `soft_cap * tanh(logits / soft_cap)`.
    """

    def __init__(
        self, layer: ColumnParallelLinear, *, vocab_size: int, soft_cap: float | None = None
    ) -> None:
        super().__init__()
        self.soft_cap = soft_cap
        self.register_parameter("weight", layer.weight)
        self.vocab_size = vocab_size
        self.tp_group = cast("dist.ProcessGroup", layer.tp_group)
        self.sequence_parallel = layer.sequence_parallel

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, **unused: object
    ) -> tuple[torch.Tensor, None]:
        """Return the full hidden states `[seq, batch, hidden]`, gathered from sequence shards.

        The gradient has to be replicated over tensor-parallel ranks, as it is after the all-reduce
        over the vocabulary: the backward pass of the gather takes its slice without a reduction.
        """
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden, None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the weight for a checkpoint, sharded along the vocabulary."""
        return sharded_weight(self, prefix, sharded_offsets, metadata, tp_group=self.tp_group)


def _block_spec(
    config: DecoderConfig, vp_stage: int | None, *, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """Return the layer specs of a model chunk of this rank."""
    if transformer_engine:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    with_experts, linear = layers_with_experts(config), _linear_layers(config)
    layers = [
        _layer_spec(
            config,
            num_experts=config.num_moe_experts if with_experts[layer] else None,
            is_linear=linear[layer],
        )
        for layer in range(first, first + num_layers)
    ]
    # Without a norm of its own the block would end in `WrappedTorchNorm`.
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)  # type: ignore[arg-type]


class _LocalModules(LocalSpecProvider):
    """Megatron-core's local modules, with our attention, normalisation and experts."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """Return the normalisation layer."""
        return RMSNorm

    def core_attention(self) -> type:
        """Return the attention module."""
        return PackedAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False
    ) -> Any:
        """Return the experts' module and their layers."""
        layers = MLPSubmodules(linear_fc1=self.column_parallel_linear(), linear_fc2=ExpertOutput)
        return experts_spec(GroupedExperts, layers)


def _layer_spec(config: DecoderConfig, *, num_experts: int | None, is_linear: bool) -> ModuleSpec:
    modules = _LocalModules()
    norm_before = modules.layer_norm() if config.norm_before else IdentityOp
    # Annotated as a module, but Megatron-core passes functions too.
    add_residual: Any = get_bias_dropout_add
    if config.norm_after:
        add_residual = ModuleSpec(module=NormThenAdd, params={"config": config})
    # Transformer Engine's names of the same weights: checkpoints are interchangeable between both
    # kinds of layers. Extra states of its modules are dropped, see `without_extra_states`.
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if num_experts is None:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    attention = _attention_spec(config, modules)
    if is_linear:
        attention = ModuleSpec(module=GatedDeltaNet)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm_before,
            self_attention=attention,
            self_attn_bda=add_residual,
            pre_mlp_layernorm=norm_before,
            mlp=get_mlp_module_spec_for_backend(backend=modules, num_experts=num_experts),
            mlp_bda=add_residual,
            sharded_state_dict_keys_map=names,
        ),
    )


def _attention_spec(config: DecoderConfig, modules: _LocalModules) -> ModuleSpec:
    causal = {"attn_mask_type": AttnMaskType.causal}
    linear = modules.column_parallel_linear()
    if config.multi_latent_attention:
        latent = MLASelfAttentionSubmodules(
            linear_q_proj=linear,
            linear_q_down_proj=linear,
            linear_q_up_proj=linear,
            linear_kv_down_proj=linear,
            linear_kv_up_proj=linear,
            core_attention=modules.core_attention(),
            linear_proj=modules.row_parallel_linear(),
            q_layernorm=IdentityOp if config.q_lora_rank is None else modules.layer_norm(),
            kv_layernorm=modules.layer_norm(),
        )
        return ModuleSpec(module=LatentAttention, params=causal, submodules=latent)
    query_norm = key_norm = modules.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    if config.norm_of_all_heads:
        query_norm, key_norm = NormOfAllQueries, NormOfAllKeys
    attention = SelfAttentionSubmodules(
        linear_qkv=linear,
        core_attention=modules.core_attention(),
        linear_proj=modules.row_parallel_linear(),
        q_layernorm=query_norm,
        k_layernorm=key_norm,
    )
    module = SelfAttention
    if config.window_rotary_base is not None:
        module = WindowRotaryAttention
    elif config.attention_output_gate:
        module = GatedAttention
    return ModuleSpec(module=module, params=causal, submodules=attention)


def _linear_layers(config: DecoderConfig) -> list[bool]:
    """Return for every layer of the model whether its attention is linear."""
    pattern = config.linear_attention_freq
    if pattern is None:
        return [False] * config.num_layers
    assert isinstance(pattern, list), pattern
    return [bool(each) for each in pattern]


def layers_with_experts(config: DecoderConfig) -> list[bool]:
    """Return for every layer of the model whether it is an MoE layer."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(config.num_layers)]
    return [bool(each) for each in frequency]
