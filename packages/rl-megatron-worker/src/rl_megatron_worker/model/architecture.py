"""What a model is, in Megatron-core's terms, whatever the layout, the dtype and the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A Hugging Face config, said in the arguments of Megatron-core's `GPTModel`."""

    transformer: dict[str, Any]
    """The fields of `TransformerConfig` that the model determines: `num_layers`, `hidden_size` ...

    With experts, `moe_layer_freq` is a list with 1 for each layer that has them and 0 for others.
    """
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

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return self.transformer["num_layers"]

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, is a mixture of experts."""
        if self.transformer.get("num_moe_experts") is None:
            return False
        return self.transformer["moe_layer_freq"][layer] == 1
