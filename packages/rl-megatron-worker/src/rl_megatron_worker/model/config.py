"""A model's architecture and the user's choices, as Megatron-core's `TransformerConfig`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig

if TYPE_CHECKING:
    from rl_megatron_worker.parallel.groups import MegatronLayout
    from rl_megatron_worker.runtime import Runtime

Fields = dict[str, Any]
"""Arguments of a Megatron-core class by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A Hugging Face config as arguments of Megatron-core's `GPTModel`."""

    transformer: Fields
    """The fields of `DecoderConfig` that the model determines: `num_layers`, `hidden_size` ...

    For an MoE model `moe_layer_freq` is a list with 1 for each MoE layer and 0 for others.
    """
    vocab_size: int
    """Number of tokens, without padding for tensor parallelism."""
    max_sequence_length: int
    """The longest sequence that the model supports."""
    tied_embeddings: bool
    """Whether the output layer shares the embedding's weight."""
    rotary_base: float
    """Base (theta) of the rotary embedding."""
    rotary_scaling: Fields = field(default_factory=dict)
    """`GPTModel`'s arguments for scaled or partial rotary embeddings; empty without either."""

    @property
    def num_layers(self) -> int:
        """Number of layers, over all stages."""
        return self.transformer["num_layers"]

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, is an MoE layer."""
        if self.transformer.get("num_moe_experts") is None:
            return False
        return self.transformer["moe_layer_freq"][layer] == 1

    def is_linear(self, layer: int) -> bool:
        """Return whether the attention of a layer, counted from 0, is linear."""
        pattern = self.transformer.get("linear_attention_freq")
        return pattern is not None and pattern[layer] == 1


@dataclass
class DecoderConfig(MLATransformerConfig):
    """Megatron-core's config, and what models have that its own layers lack."""

    multi_latent_attention: bool = False
    own_layers: bool = False
    """Whether layers have modules that Transformer Engine lacks; all are local ones then."""
    norm_before: bool = True
    """Whether the inputs of attention and MLP are normalised."""
    norm_after: bool = False
    """Whether the outputs of attention and MLP are normalised before they are added."""
    norm_of_all_heads: bool = False
    """Whether queries, and keys, of all heads are normalised together."""
    attention_soft_cap: float | None = None
    """Bound on the scores of attention: `cap * tanh(scores / cap)`."""
    logits_soft_cap: float | None = None
    """The same of logits."""
    embedding_scale: float = 1.0
    """Factor on the embeddings of tokens."""
    window_rotary_base: float | None = None
    """Base (theta) of rotary embeddings in layers with a window; None: as in the other layers."""
    rotary_frequencies: tuple[float, ...] | None = None
    """Those of the layers without a base of their own, `[rotated size / 2]`, radians per token;
    None: as `GPTModel` computes them."""
    rotary_scale: float = 1.0
    """Factor on queries and on keys where they are rotated by `rotary_frequencies`."""
    router_scores_per_group: int | None = None
    """How many of a group's best experts its score is the sum of; None: as Megatron-core has it,
    `moe_router_topk // moe_router_group_topk`."""

    def __post_init__(self) -> None:
        """Complete the fields, and check them as Megatron-core does."""
        # Megatron-core refuses biases of experts with expert-tensor parallelism, which
        # `ExpertOutput` adds once, and gates with latent attention, which no model has.
        allowed = {
            name: getattr(self, name) for name in ("add_bias_linear", "attention_output_gate")
        }
        for name in allowed:
            setattr(self, name, False)
        super().__post_init__()
        for name, value in allowed.items():
            setattr(self, name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """The user's choices for a model, besides the parallel layout."""

    params_dtype: torch.dtype
    """Dtype of parameters, compute, and activations sent between stages."""
    recompute_granularity: str | None = None
    """`full` recomputes layers in the backward pass, `selective` core attention only."""
    recompute_method: str | None = None
    """`uniform` or `block`, with `full`."""
    recompute_num_layers: int | None = None
    """With `full`: layers per checkpoint (`uniform`), or recomputed layers (`block`)."""
    freezes_routers: bool = False
    """Whether the routers of experts are not trained."""
    moe_options: Fields = field(default_factory=dict)
    """Further MoE fields of `TransformerConfig`."""
    fuses_rope: bool = True
    """Whether Transformer Engine's layers rotate queries and keys in a fused kernel."""

    @property
    def recomputed_unit(self) -> int | None:
        """Layers recomputed as one unit under `uniform`; None otherwise."""
        return self.recompute_num_layers if self.recompute_method == "uniform" else None


def transformer_config(
    architecture: Architecture, layout: MegatronLayout, options: ModelOptions, runtime: Runtime
) -> DecoderConfig:
    """Return Megatron-core's config of the model.

    Fused kernels need a GPU or Transformer Engine; without them unfused operators are used.
    """
    own_layers = architecture.transformer.get("own_layers", False)
    engine = not own_layers and _has_transformer_engine(runtime, options.params_dtype)
    moe_options = {"moe_token_dispatcher_type": "alltoall", **options.moe_options}
    is_gated = architecture.transformer.get("gated_linear_unit", False)
    is_swiglu = is_gated and architecture.transformer.get("activation_func") is F.silu
    fields = {
        "params_dtype": options.params_dtype,
        "pipeline_dtype": options.params_dtype,
        "bf16": options.params_dtype is torch.bfloat16,
        "fp16": options.params_dtype is torch.float16,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_stages,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        "recompute_granularity": options.recompute_granularity,
        "recompute_method": options.recompute_method,
        "recompute_num_layers": options.recompute_num_layers,
        # Packed micro-batches differ in their number of tokens. Megatron-core rejects that for the
        # all-gather dispatcher; `plan_layout` rejects that dispatcher wherever it matters.
        "variable_seq_lengths": moe_options["moe_token_dispatcher_type"] != "allgather",
        # With two stages, next and previous rank are the same: batched sends of an interleaved
        # schedule would match a forward activation with a backward gradient.
        "overlap_p2p_comm": layout.virtual_stages is not None,
        "batch_p2p_comm": layout.virtual_stages is None,
        # Gradients are summed, not averaged: the loss is already divided by a global count.
        "calculate_per_token_loss": True,
        "rotary_base": architecture.rotary_base,
        "init_method": _no_init,
        "output_layer_init_method": _no_init,
        "embedding_init_method": _no_init,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": runtime.on_cuda and is_swiglu,
        "bias_dropout_fusion": runtime.on_cuda,
        "apply_rope_fusion": engine and options.fuses_rope,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": engine,
        "moe_permute_fusion": False,
        "moe_grouped_gemm": False,
    }
    return DecoderConfig(**(architecture.transformer | fields | moe_options))


def uses_transformer_engine(runtime: Runtime, config: DecoderConfig) -> bool:
    """Return whether a model's layers are built from Transformer Engine's modules."""
    return not config.own_layers and _has_transformer_engine(runtime, config.params_dtype)


def _has_transformer_engine(runtime: Runtime, dtype: torch.dtype) -> bool:
    is_installed = importlib.util.find_spec("transformer_engine") is not None
    return is_installed and fits_transformer_engine(dtype, on_cuda=runtime.on_cuda)


def fits_transformer_engine(dtype: torch.dtype, *, on_cuda: bool) -> bool:
    """Return whether Transformer Engine supports layers of this dtype.

    It needs a GPU, and its attention over packed sequences ("thd") is 16-bit only: neither flash
    nor fused attention supports float32, and its unfused attention does not support thd.
    """
    return on_cuda and dtype in (torch.bfloat16, torch.float16)


def padded_vocab_size(architecture: Architecture, layout: MegatronLayout) -> int:
    """Return the vocabulary size, padded to a multiple of the tensor-parallel size."""
    return -(-architecture.vocab_size // layout.tensor) * layout.tensor


def _no_init(weight: torch.Tensor) -> torch.Tensor:
    """Leave the weight uninitialised, as weights are loaded, and the RNG state unchanged.

    Initialisation cannot be disabled: Megatron-core sets the tensor-parallel attributes there.
    """
    return weight
