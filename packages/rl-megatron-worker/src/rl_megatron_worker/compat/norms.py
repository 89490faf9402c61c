"""The normalisation of Megatron-core's layers where Transformer Engine is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(nn.Module):
    """Root-mean-square normalisation whose ranks may each have a part of the sequence.

    Megatron-core's own wrapper refuses those. All that they need is a gradient that is summed over
    the ranks, for which Megatron-core looks at the parameter's `sequence_parallel`.

    Args:
        config: The model.
        hidden_size: Size of the last dimension.
        eps: Added to the mean of squares.
        unread: What other normalisations take.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unread: Any
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
        """Return `hidden` normalised, `[..., hidden_size]`."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
