"""This rank's part of the model: Megatron-core's `GPTModel`, in one chunk or several.

The last stage returns hidden states instead of logits: log-probabilities are taken from them and
the output matrix without ever holding all logits. For this the output layer is replaced, under its
own name and with its own parameter, by one that hands its input on (`OutputMatrix`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from rl_megatron_worker.model.output_layer import OutputMatrix
from rl_megatron_worker.model.specs import (
    block_spec,
    fits_transformer_engine,
    has_transformer_engine,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist
    from megatron.core.distributed import DistributedDataParallelConfig

    from rl_megatron_worker.attention.packed import PackedRows
    from rl_megatron_worker.model.architecture import Architecture
    from rl_megatron_worker.parallel.groups import MegatronLayout
    from rl_megatron_worker.runtime import Runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """What the user chooses of a model, beside its layout."""

    params_dtype: torch.dtype
    """Of the parameters, and of compute."""
    pipeline_dtype: torch.dtype
    """Of what stages send each other."""
    recompute_granularity: str | None = None
    """`full`: whole layers are computed again in the backward pass; `selective`: attention."""
    recompute_method: str | None = None
    """`uniform` or `block`, with `full`."""
    recompute_num_layers: int | None = None
    """Layers between what is kept, or layers that are computed again, with `full`."""
    moe_options: Mapping[str, Any] = field(default_factory=dict)
    """What `TransformerConfig` takes of a mixture of experts beside its architecture."""

    @property
    def recomputed_unit(self) -> int | None:
        """Layers that are computed again together, all of them so; None where layers are not."""
        return self.recompute_num_layers if self.recompute_method == "uniform" else None


def transformer_config(
    architecture: Architecture, layout: MegatronLayout, options: ModelOptions, runtime: Runtime
) -> TransformerConfig:
    """Return Megatron-core's config of the model.

    Fusions are compiled for a GPU; without one, and without Transformer Engine, plain operators
    compute the same.
    """
    engine = uses_transformer_engine(runtime, options.params_dtype)
    moe_options = {"moe_token_dispatcher_type": "alltoall", **options.moe_options}
    is_gated = architecture.transformer.get("gated_linear_unit", False)
    fields = {
        "params_dtype": options.params_dtype,
        "pipeline_dtype": options.pipeline_dtype,
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
        # Micro-batches are of unlike numbers of tokens. Gathering tokens for experts is the one
        # thing that refuses this, and is refused where it matters by the layout.
        "variable_seq_lengths": moe_options["moe_token_dispatcher_type"] != "allgather",
        # Two ranks that are each other's next and previous stage mix up what goes forward and what
        # comes back, unless these are communications of their own.
        "overlap_p2p_comm": layout.virtual_stages is not None,
        "batch_p2p_comm": layout.virtual_stages is None,
        # Gradients are sums: the loss is divided by a global count.
        "calculate_per_token_loss": True,
        "init_method": _leave_as_is,
        "output_layer_init_method": _leave_as_is,
        "embedding_init_method": _leave_as_is,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": runtime.on_cuda and is_gated,
        "bias_dropout_fusion": runtime.on_cuda,
        "apply_rope_fusion": engine,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": engine,
        "moe_permute_fusion": False,
        "moe_grouped_gemm": False,
    }
    return TransformerConfig(**(architecture.transformer | fields | moe_options))


def uses_transformer_engine(runtime: Runtime, dtype: torch.dtype) -> bool:
    """Return whether layers of this dtype are Transformer Engine's."""
    return fits_transformer_engine(dtype, on_cuda=runtime.on_cuda) and has_transformer_engine()


def padded_vocab_size(architecture: Architecture, layout: MegatronLayout) -> int:
    """Return the vocabulary's size, completed for tensor-parallel ranks to share it evenly."""
    return -(-architecture.vocab_size // layout.tensor) * layout.tensor


def build_model(
    architecture: Architecture,
    config: TransformerConfig,
    layout: MegatronLayout,
    runtime: Runtime,
    *,
    ddp: DistributedDataParallelConfig | None,
) -> list[nn.Module]:
    """Return the chunks of this rank, one per virtual stage. Collective.

    The parameters are not initialised: they are to be loaded.

    Args:
        architecture: The model.
        config: From `transformer_config`.
        layout: The ranks.
        runtime: The device.
        ddp: How gradients are reduced; None for a model that is not trained.
    """
    stages = [None] if layout.virtual_stages is None else range(layout.virtual_stages)
    with runtime.scope():
        chunks: list[nn.Module] = []
        for index, vp_stage in enumerate(stages):
            chunk: nn.Module = _build_chunk(architecture, config, layout, runtime, vp_stage)
            if config.fp16 or config.bf16:
                chunk = Float16Module(config, chunk)
            if ddp is None:
                chunk.requires_grad_(False)
            else:
                # Only the reduction of the first chunk is not hidden behind another's backward.
                chunk = DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
            chunks.append(chunk)
    return chunks


def run_chunk(chunk: nn.Module, tokens: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """Return what a chunk makes of a micro-batch; call it inside the runtime's scope.

    Args:
        chunk: From `build_model`; a stage that is not the first has been given its input.
        tokens: `[own tokens]` int64, this context-parallel rank's.
        rows: Where the tokens lie.

    Returns:
        Of the last stage hidden states `[own tokens, hidden]`, in the model's dtype, alike on all
        tensor-parallel ranks; of others what they send to the next.
    """
    # Wrappers of 16-bit models would otherwise return float32.
    options = {"fp32_output": False} if _is_16_bit(chunk) else {}
    output = chunk(
        input_ids=tokens[None],
        # Positions are the rotary embedding's, which takes them from the rows.
        position_ids=None,
        attention_mask=None,
        packed_seq_params=rows,
        **options,
    )
    return output[0] if unwrapped(chunk).post_process else output


def unwrapped(chunk: nn.Module) -> GPTModel:
    """Return the `GPTModel` of a chunk."""
    while not isinstance(chunk, GPTModel):
        chunk = cast("nn.Module", chunk.module)
    return chunk


def output_matrix(chunk: nn.Module) -> torch.Tensor:
    """Return this rank's part of the last stage's output matrix, `[padded vocab / tp, hidden]`."""
    model = unwrapped(chunk)
    assert model.post_process
    weight: Any = model.output_layer.weight
    if model.share_embeddings_and_output_weights:
        weight = model.shared_embedding_or_output_weight()
    return weight


class HeadOptions(TypedDict):
    """What `rl_batched_data` takes to score tokens by hidden states; its `ScoringOptions`."""

    output_matrix: torch.Tensor
    vocab_start: int
    tp_group: dist.ProcessGroup


def scoring_options(chunk: nn.Module) -> HeadOptions:
    """Return how tokens are scored by the last stage's hidden states.

    What completes the vocabulary for tensor parallelism is left out: it is no token.
    """
    layer = cast("OutputMatrix", unwrapped(chunk).output_layer)
    matrix = output_matrix(chunk)
    start = layer.tp_group.rank() * len(matrix)
    return {
        "output_matrix": matrix[: max(layer.vocab_size - start, 0)],
        "vocab_start": start,
        "tp_group": layer.tp_group,
    }


def _build_chunk(
    architecture: Architecture,
    config: TransformerConfig,
    layout: MegatronLayout,
    runtime: Runtime,
    vp_stage: int | None,
) -> GPTModel:
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    # Megatron-core takes more than its annotations say: layers in a block, a base with a fraction.
    engine = uses_transformer_engine(runtime, config.params_dtype)
    layers: Any = block_spec(config, vp_stage=vp_stage, transformer_engine=engine)
    rotary_base: Any = architecture.rotary_base
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=padded_vocab_size(architecture, layout),
        max_sequence_length=architecture.max_sequence_length,
        pre_process=is_first,
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=rotary_base,
        vp_stage=vp_stage,
        **architecture.rotary_scaling,
    )
    if is_last:
        head: Any = OutputMatrix(model.output_layer, vocab_size=architecture.vocab_size)
        model.output_layer = head
    return model


def _is_16_bit(chunk: nn.Module) -> bool:
    config: Any = chunk.config
    return config.fp16 or config.bf16


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    """Initialise nothing, as weights are loaded, and draw nothing from the random state.

    Megatron-core marks how weights are cut where it initialises them, so it has to be let.
    """
    return weight
