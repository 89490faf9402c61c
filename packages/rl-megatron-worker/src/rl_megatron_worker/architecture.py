"""What a model is, in Megatron-core's terms, whatever the layout, the dtype and the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A Hugging Face config, said in the arguments of Megatron-core's `GPTModel`."""

    transformer: dict[str, Any]
    """The fields of `TransformerConfig` that the model determines: `num_layers`, `hidden_size` ..."""
    vocab_size: int
    """Tokens, without the padding that tensor parallelism adds."""
    max_sequence_length: int
    """Positions that the model was made for."""
    tied_embeddings: bool
    """Whether the output layer is the embedding."""
    rotary_base: float
    """Theta of the rotary embedding."""
    rotary_scaling: dict[str, Any] = field(default_factory=dict)
    """`GPTModel`'s arguments for scaled rotary embeddings; empty where the model has none."""
