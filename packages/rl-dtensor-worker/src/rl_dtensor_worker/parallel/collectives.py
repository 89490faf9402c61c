"""Differentiable collectives over one tensor dimension.

Each pairs a collective with its conjugate in the backward pass, as in Shoeybi et al. 2019,
"Megatron-LM", section 3. Which conjugate is right depends on what follows: ranks that go on with
their own shard each have a partial gradient, which must be summed; ranks that all compute the same
already have the full gradient.

| forward | backward | function |
|---|---|---|
| identity | all-reduce | `copy_to_group` |
| all-reduce | identity | `reduce_from_group` |
| all-gather | reduce-scatter | `gather_for_sharded_use` |
| reduce-scatter | all-gather | `reduce_scatter_to_group` |
| all-gather | local chunk | `gather_for_replicated_use` |
| local chunk | all-gather | `scatter_to_group` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from rl_interfaces.backend.runtime import all_gather_single

if TYPE_CHECKING:
    from collections.abc import Callable

# torch 2.13 renamed it, and warns about the older name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_dim(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return the ranks' equally shaped `values` concatenated along `dim`."""
    # The collective concatenates along dim 0 of contiguous memory.
    own = values.movedim(dim, 0).contiguous()
    gathered = own.new_empty((own.shape[0] * group.size(), *own.shape[1:]))
    all_gather_single(gathered, own, group=group)
    return gathered.movedim(0, dim).contiguous()


def reduce_scatter_dim(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's chunk, along `dim`, of the sum of the ranks' `values`."""
    own = values.movedim(dim, 0).contiguous()
    chunk = own.new_empty((own.shape[0] // group.size(), *own.shape[1:]))
    _reduce_scatter(chunk, own, group=group)
    return chunk.movedim(0, dim).contiguous()


def local_chunk(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's chunk of replicated `values` along `dim`, as a view."""
    return values.chunk(group.size(), dim)[group.rank()]


def copy_to_group(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `values`; all-reduce the gradient in the backward pass."""
    # A view: an autograd function that returns its input itself would mark it as modified.
    return _with_backward(values, lambda own: own.view_as(own), lambda grad: _sum(grad, group))


def reduce_from_group(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the ranks' `values`; identity in the backward pass."""
    return _with_backward(values, lambda own: _sum(own, group), lambda grad: grad)


def gather_for_sharded_use(
    values: torch.Tensor, group: dist.ProcessGroup, dim: int
) -> torch.Tensor:
    """All-gather shards that each rank then uses differently; reduce-scatter the gradient."""
    return _with_backward(
        values,
        lambda own: all_gather_dim(own, group, dim),
        lambda grad: reduce_scatter_dim(grad, group, dim),
    )


def reduce_scatter_to_group(
    values: torch.Tensor, group: dist.ProcessGroup, dim: int
) -> torch.Tensor:
    """Return this rank's chunk of the ranks' sum; all-gather the gradient."""
    return _with_backward(
        values,
        lambda own: reduce_scatter_dim(own, group, dim),
        lambda grad: all_gather_dim(grad, group, dim),
    )


def gather_for_replicated_use(
    values: torch.Tensor, group: dist.ProcessGroup, dim: int
) -> torch.Tensor:
    """All-gather shards that every rank then uses alike; keep the local chunk of the gradient."""
    return _with_backward(
        values,
        lambda own: all_gather_dim(own, group, dim),
        lambda grad: local_chunk(grad, group, dim),
    )


def scatter_to_group(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's chunk of replicated `values`; all-gather the gradient."""
    return _with_backward(
        values,
        lambda own: local_chunk(own, group, dim).clone(),
        lambda grad: all_gather_dim(grad, group, dim),
    )


def _sum(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # The all-reduce is in place, and the caller still reads its own values.
    summed = values.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed


def _with_backward(
    values: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    return cast("torch.Tensor", _WithBackward.apply(values, forward, backward))


class _BackwardContext(Protocol):
    conjugate: Callable[[torch.Tensor], torch.Tensor]


class _WithBackward(torch.autograd.Function):
    """Runs `forward` on a tensor, and `backward` on its gradient."""

    @staticmethod
    def forward(
        ctx: _BackwardContext,
        values: torch.Tensor,
        forward: Callable[[torch.Tensor], torch.Tensor],
        backward: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.conjugate = backward
        return forward(values)

    @staticmethod
    def backward(ctx: _BackwardContext, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # One gradient per argument of `forward`; functions have none.
        return ctx.conjugate(grads[0]), None, None
