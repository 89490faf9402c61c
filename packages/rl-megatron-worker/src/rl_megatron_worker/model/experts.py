"""The experts of a layer: how they are chosen, and multiplied together."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.transformer.moe.router import TopKRouter
    from torch import nn

    from rl_megatron_worker.model.config import DecoderConfig

_ALIGNMENT = 16
"""Bytes that rows of the operands of torch's grouped product are multiples of, on a GPU."""


def expert_layers(chunk: nn.Module) -> list[MoELayer]:
    """Return the layers of a model chunk that have experts, first to last."""
    return [module for module in chunk.modules() if isinstance(module, MoELayer)]


def prepare_routers(chunk: nn.Module, config: DecoderConfig) -> None:
    """Have the routers of a chunk choose as the model does, before its weights are loaded."""
    for layer in expert_layers(chunk):
        router = cast("TopKRouter", layer.router)
        # `Float16Module` has cast the expert bias, and 16 bits cannot hold its small updates.
        router._maintain_float32_expert_bias()
        if config.router_scores_per_group is not None:
            cast("Any", router).router_replay = GroupLimitedChoice(config.router_scores_per_group)


class GroupLimitedChoice:
    """Chooses experts of the best groups only (arXiv:2412.19437, section 2.1.2).

    Megatron-core scores a group by as many of its experts as a token takes of each; models that it
    does not fit have a number of their own.

    Args:
        scores_per_group: A group's score is the sum of its best experts', this many.
    """

    def __init__(self, scores_per_group: int) -> None:
        self._scores_per_group = scores_per_group

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: object = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and experts of each token; Megatron-core's arguments and name.

        Args:
            scores: `[tokens, experts]`.
            topk: Experts per token.
            num_groups: Number of groups of consecutive experts.
            group_topk: Groups per token.
            default_compute_topk: Megatron-core's own choice.
        """
        assert num_groups is not None
        assert group_topk is not None
        grouped = scores.unflatten(1, (num_groups, -1))
        best = grouped.topk(self._scores_per_group, dim=-1).values.sum(-1)
        chosen = best.topk(group_topk, dim=-1).indices
        is_out = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
        limited = grouped.masked_fill(is_out[..., None], float("-inf")).flatten(1)
        values, experts = limited.topk(topk, dim=1)
        return values, experts


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
