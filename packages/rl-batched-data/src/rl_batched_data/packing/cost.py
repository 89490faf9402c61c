"""What a sequence costs: linear layers per token, attention per pair of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceCost:
    """`per_token * length + per_token_squared * length ** 2`, in any unit.

    Example, the cost of a sequence of 100 tokens:
        SequenceCost(per_token=2.0, per_token_squared=0.01).of(100) -> 200.0 + 100.0 = 300.0
    """

    per_token: float = 1.0
    """Cost of one token in the linear layers."""
    per_token_squared: float = 0.0
    """Cost of attention, per square of the length."""

    def __post_init__(self) -> None:
        smallest = min(self.per_token, self.per_token_squared)
        if smallest < 0 or self.per_token + self.per_token_squared == 0:
            raise ValueError(
                f"per_token={self.per_token} and per_token_squared={self.per_token_squared} must "
                f"not be negative, and not both 0"
            )

    @classmethod
    def from_model(
        cls,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        vocab_size: int,
    ) -> SequenceCost:
        """Return the floating-point operations of a dense decoder's forward pass.

        A gated MLP, causal attention, an output matrix. Training takes three times as much of
        both, which leaves their ratio as it is.
        """
        attention = hidden_size * head_dim * 2 * (num_attention_heads + num_key_value_heads)
        layer = attention + 3 * hidden_size * intermediate_size
        return cls(
            per_token=2 * (num_hidden_layers * layer + hidden_size * vocab_size),
            per_token_squared=2 * num_hidden_layers * num_attention_heads * head_dim,
        )

    def of(self, length: int) -> float:
        """Return the cost of one sequence of `length` tokens."""
        return self.per_token * length + self.per_token_squared * length * length

    def of_all(self, lengths: Sequence[int]) -> list[float]:
        """Return the cost of each sequence."""
        return [self.of(length) for length in lengths]
