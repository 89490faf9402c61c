"""This rank's chunks of the model: Megatron-core's `GPTModel`, one per virtual pipeline stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from rl_megatron_worker.model.config import padded_vocab_size, uses_transformer_engine
from rl_megatron_worker.model.heads import OutputMatrix
from rl_megatron_worker.model.specs import (
    block_spec,
)

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig

    from rl_megatron_worker.model.config import Architecture
    from rl_megatron_worker.parallel.groups import MegatronLayout
    from rl_megatron_worker.runtime import Runtime


def build_model(
    architecture: Architecture,
    config: TransformerConfig,
    layout: MegatronLayout,
    runtime: Runtime,
    *,
    ddp: DistributedDataParallelConfig | None,
) -> list[nn.Module]:
    """Return the chunks of this rank, one per virtual stage. Collective.

    Parameters are left uninitialised; load them with `load_weights`.

    Args:
        architecture: The model's architecture.
        config: From `transformer_config`.
        layout: The parallel layout.
        runtime: Device and scope of this rank.
        ddp: Gradient reduction; None for a model that is not trained.
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
                # As in Megatron-LM: buckets only for the first chunk, whose backward pass is last:
                # no other chunk's compute hides its reduction.
                chunk = DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
            chunks.append(chunk)
    return chunks


def _build_chunk(
    architecture: Architecture,
    config: TransformerConfig,
    layout: MegatronLayout,
    runtime: Runtime,
    vp_stage: int | None,
) -> GPTModel:
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    # Megatron-core's annotations are too narrow: it takes block specs, and a float base.
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
