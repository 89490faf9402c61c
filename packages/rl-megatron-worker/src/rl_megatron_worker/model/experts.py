"""The experts of a layer: how they are chosen, and multiplied together."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from megatron.core.transformer.moe.router import TopKRouter

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
        """Return the outputs of the tokens, `[tokens, hidden_size]`, biases added, and no bias.

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
        experts = cast("list[Any]", [*self.local_experts])
        first = [expert.linear_fc1.bias for expert in experts]
        together.linear_fc1 = _GroupedLinear(self._weights("linear_fc1"), ends, biases=first)
        together.linear_fc2 = _GroupedLinear(self._weights("linear_fc2"), ends)
        output, _ = together.forward(permuted_local_hidden_states, permuted_probs)
        if self.config.add_bias_linear:
            last = [expert.linear_fc2.shared_bias() for expert in experts]
            biases = _of_tokens(last, ends, num_tokens=len(output))
            output = output + (biases * permuted_probs[:, None]).type_as(output)
        return output, None

    def _can_be_grouped(self) -> bool:
        """Return whether there are several experts, of sizes that the kernel takes."""
        if self.num_local_experts == 1 or self.config.moe_apply_probs_on_input:
            return False
        first = [self._weights(name)[0] for name in ("linear_fc1", "linear_fc2")]
        return all(
            size * weight.itemsize % _ALIGNMENT == 0 for weight in first for size in weight.shape
        )

    def _weights(self, projection: str) -> list[torch.Tensor]:
        """Return the weight of each expert."""
        return [getattr(expert, projection).weight for expert in self.local_experts]


class _GroupedLinear(nn.Module):
    """Calls the linear layers of all experts, each with its own tokens."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        ends: torch.Tensor,
        *,
        biases: Sequence[torch.Tensor | None] = (None,),
    ) -> None:
        super().__init__()
        self._weights = weights
        self._ends = ends
        self._biases = [bias for bias in biases if bias is not None]

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs of the tokens, `[tokens, size]`, and their biases."""
        output = cast("torch.Tensor", _GroupedProduct.apply(tokens, self._ends, *self._weights))
        if not self._biases:
            return output, None
        return output, _of_tokens(self._biases, self._ends, num_tokens=len(tokens))


def _of_tokens(
    biases: Sequence[torch.Tensor], ends: torch.Tensor, *, num_tokens: int
) -> torch.Tensor:
    """Return the bias of each token's expert, `[tokens, size]`.

    Args:
        biases: Of each expert, `[size]`.
        ends: `[experts]`: where the tokens of each end.
        num_tokens: Their total, which the host knows without waiting for the device.
    """
    places = torch.arange(num_tokens, device=ends.device)
    experts = torch.searchsorted(ends, places.to(ends.dtype), right=True)
    return torch.stack(list(biases)).index_select(0, experts)


class ExpertOutput(RowParallelLinear):
    """An expert's second projection, whose bias is added once over expert-tensor-parallel ranks.

    Megatron-core would add it on each rank, before their outputs are summed, and refuses that.
    """

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        if self.bias is not None:
            # Ranks may hold other experts, and those of one hold the full gradient.
            self.bias.sequence_parallel = False  # type: ignore[attr-defined]
            # What is not marked counts in gradient norms on the first tensor-parallel rank alone,
            # and the others may hold experts of their own.
            is_first = cast("dist.ProcessGroup", self.tp_group).rank() == 0
            self.bias.tensor_model_parallel = is_first  # type: ignore[attr-defined]

    def shared_bias(self) -> torch.Tensor:
        """Return this rank's share of the bias, `[hidden_size]`."""
        assert self.bias is not None
        num_ranks = cast("dist.ProcessGroup", self.tp_group).size()
        return cast("torch.Tensor", _Share.apply(self.bias, num_ranks))

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output of this rank's units, and its share of the bias."""
        output, bias = super().forward(input_)
        return output, None if bias is None else self.shared_bias()


class _Share(torch.autograd.Function):
    """A rank's share of a sum, `values / num_ranks`, whose gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, num_ranks: int) -> torch.Tensor:
        return values / num_ranks

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


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
