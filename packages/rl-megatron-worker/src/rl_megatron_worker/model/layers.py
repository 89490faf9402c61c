"""Modules of layers that Megatron-core lacks, or that need a GPU there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_megatron_worker.model.config import DecoderConfig

OutputWithBias = tuple[torch.Tensor, torch.Tensor | None]


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
        self, config: DecoderConfig, hidden_size: int, eps: float = 1e-5, **unused: object
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


class NormThenAdd(RMSNorm):
    """Normalises the output of attention or MLP before it is added to the residual.

    It stands in the place of Megatron-core's `get_bias_dropout_add`, and is called like it.

    Args:
        config: Megatron-core's config of the model.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, config.hidden_size, config.layernorm_epsilon)

    def forward(  # type: ignore[override]
        self, training: bool, fused: bool
    ) -> Callable[[OutputWithBias, torch.Tensor, float], torch.Tensor]:
        """Return the function of output, residual and dropout, as Megatron-core calls it."""

        def add(
            output_with_bias: OutputWithBias, residual: torch.Tensor, dropout: float
        ) -> torch.Tensor:
            output, bias = output_with_bias
            output = super(NormThenAdd, self).forward(output if bias is None else output + bias)
            return residual + F.dropout(output, dropout, training)

        return add
