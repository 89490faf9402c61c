"""A chunk of the model on this rank: unwrapped, run, and its parameters by their global names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from megatron.core.models.gpt import GPTModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from rl_megatron_worker.attention.packed import PackedRows

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_PLACE = re.compile(r"^decoder\.layers\.\d+\.|^[^.]+\.(?:final_layernorm\.)?")


def unwrapped(chunk: nn.Module) -> GPTModel:
    """Return the `GPTModel` of a chunk."""
    while not isinstance(chunk, GPTModel):
        chunk = cast("nn.Module", chunk.module)
    return chunk


def run_chunk(chunk: nn.Module, tokens: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """Run a chunk's forward pass; call it inside the runtime's scope.

    Args:
        chunk: From `build_model`; the schedule has set the input of stages after the first.
        tokens: `[own tokens]` int64, the shard of this context-parallel rank.
        rows: The packed-sequence parameters.

    Returns:
        On the last stage hidden states `[own tokens, hidden]` in the model's dtype, replicated
        over tensor-parallel ranks; on others the activations for the next stage.
    """
    # `Float16Module` would otherwise cast the output to float32.
    options = {"fp32_output": False} if _is_16_bit(chunk) else {}
    output = chunk(
        input_ids=tokens[None],
        # Rotary embeddings take positions from the packed-sequence parameters.
        position_ids=None,
        attention_mask=None,
        packed_seq_params=rows,
        **options,
    )
    return output[0] if unwrapped(chunk).post_process else output


def held_parameters(chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by global name: layers and experts counted over all ranks.

    Args:
        chunks: This rank's `GPTModel`s, wrapped or not.
    """
    held: dict[str, nn.Parameter] = {}
    for chunk in chunks:
        model = unwrapped(chunk)
        for name, parameter in model.named_parameters():
            held[_global_name(name, model)] = parameter
    return held


def place_of(name: str) -> str:
    """Return the prefix of a global name that determines its pipeline stage.

    Example: "decoder.layers.3.mlp.router.weight" -> "decoder.layers.3."
    """
    match = _PLACE.match(name)
    assert match is not None, name
    return match.group()


def _is_16_bit(chunk: nn.Module) -> bool:
    config: Any = chunk.config
    return config.fp16 or config.bf16


def _global_name(name: str, model: Any) -> str:
    match = _LAYER.match(name)
    if match is None:
        return name
    layer = model.decoder.layers[int(match.group(1))]
    rest = _EXPERT.sub(
        lambda expert: f".local_experts.{layer.mlp.local_expert_indices[int(expert.group(1))]}.",
        name[match.end() :],
    )
    # Megatron-core counts layers from 1.
    return f"decoder.layers.{layer.layer_number - 1}.{rest}"
