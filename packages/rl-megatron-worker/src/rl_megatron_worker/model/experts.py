"""The experts of a layer, multiplied together instead of one after the other."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

_ALIGNMENT = 16
"""Bytes that rows of the operands of torch's grouped product are multiples of, on a GPU."""


def expert_layers(chunk: nn.Module) -> list[MoELayer]:
    """Return the layers of a model chunk that have experts, first to last."""
    return [module for module in chunk.modules() if isinstance(module, MoELayer)]


class GroupedExperts(SequentialMLP):
    """Megatron-core's experts, with their parameters, by one grouped product a projection.

    `SequentialMLP` launches each expert's kernels by itself, and waits for the device to know how
    many tokens each expert has. Its `GroupedMLP` needs a package of its own, on a GPU, and lays the
    weights out otherwise, so that checkpoints and exports would differ.
    """

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs of the tokens, `[tokens, hidden_size]`, and no bias.

        Args:
            permuted_local_hidden_states: `[tokens, hidden_size]`, those of an expert together.
            tokens_per_expert: `[local experts]`, how many tokens each has.
            permuted_probs: `[tokens]`, the factor on each token's output.
        """
        if not self._can_be_grouped():
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        device = permuted_local_hidden_states.device
        ends = tokens_per_expert.to(device, non_blocking=True).cumsum(0).to(torch.int32)
        # An expert with the weights of all: its activation is Megatron-core's, fused or not.
        together: Any = copy.copy(self.local_experts[0])
        together._modules = {}
        together.linear_fc1 = _GroupedLinear(self._weights("linear_fc1"), ends)
        together.linear_fc2 = _GroupedLinear(self._weights("linear_fc2"), ends)
        return together.forward(permuted_local_hidden_states, permuted_probs)

    def _can_be_grouped(self) -> bool:
        """Return whether the experts have no biases, and sizes that the kernel takes."""
        config = self.config
        if self.num_local_experts == 1 or config.add_bias_linear or config.moe_apply_probs_on_input:
            return False
        first = [self._weights(name)[0] for name in ("linear_fc1", "linear_fc2")]
        return all(
            size * weight.itemsize % _ALIGNMENT == 0 for weight in first for size in weight.shape
        )

    def _weights(self, projection: str) -> list[torch.Tensor]:
        """Return the weight of each expert."""
        return [getattr(expert, projection).weight for expert in self.local_experts]


class _GroupedLinear:
    """Calls the linear layers of all experts, each with its own tokens."""

    def __init__(self, weights: Sequence[torch.Tensor], ends: torch.Tensor) -> None:
        self._weights = weights
        self._ends = ends

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        return cast("torch.Tensor", _GroupedProduct.apply(tokens, self._ends, *self._weights)), None


class _GroupedProduct(torch.autograd.Function):
    """`tokens @ weight.T` of each expert.

    The weights are stacked for each product and not kept: in memory they stand twice for the time
    of one projection only.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        return F.grouped_mm(tokens, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        tokens, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_tokens = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_tokens = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            grad_weights = F.grouped_mm(grad.T, tokens, offs=ends)
        parts = [None] * len(weights) if grad_weights is None else grad_weights.unbind(0)
        return grad_tokens, None, *parts
