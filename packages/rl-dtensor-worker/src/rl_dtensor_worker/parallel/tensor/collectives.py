"""Collectives that a backward pass can go through, over a dimension of the caller's choice.

Each pairs with its own backward for activations that every rank of the group computes alike, as in
Shoeybi et al. 2019, "Megatron-LM", section 3: what is the sum of all ranks going forward needs no
sum coming back, and the other way round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

# Their names since torch 2.13, which warns of the others.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_dim(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return the ranks' `values`, of one shape, joined along `dim`."""
    own = values.movedim(dim, 0).contiguous()
    joined = own.new_empty((own.shape[0] * group.size(), *own.shape[1:]))
    all_gather_single(joined, own, group=group)
    return joined.movedim(0, dim).contiguous()


def reduce_scatter_dim(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's part, along `dim`, of the sum of the ranks' `values`."""
    own = values.movedim(dim, 0).contiguous()
    part = own.new_empty((own.shape[0] // group.size(), *own.shape[1:]))
    _reduce_scatter(part, own, group=group)
    return part.movedim(0, dim).contiguous()


def part_of(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's part of `values` along `dim`, a view."""
    return values.chunk(group.size(), dim)[group.rank()]


def copy_to_ranks(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `values`; the ranks' gradients are summed."""
    return _paired(values, lambda own: own.view_as(own), lambda grad: _sum(grad, group))


def sum_over_ranks(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the ranks' `values`; the gradient, which is theirs all, is passed on."""
    return _paired(values, lambda own: _sum(own, group), lambda grad: grad)


def gather_parts(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Join the ranks' parts for use by each in its own way: gradients are summed, and cut."""
    return _paired(
        values,
        lambda own: all_gather_dim(own, group, dim),
        lambda grad: reduce_scatter_dim(grad, group, dim),
    )


def scatter_sum(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's part of the ranks' sum; the gradients of the parts are joined."""
    return _paired(
        values,
        lambda own: reduce_scatter_dim(own, group, dim),
        lambda grad: all_gather_dim(grad, group, dim),
    )


def gather_alike(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Join the ranks' parts for use by all in the same way: the gradient is cut, not summed."""
    return _paired(
        values,
        lambda own: all_gather_dim(own, group, dim),
        lambda grad: part_of(grad, group, dim),
    )


def take_part(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's part of what all ranks have; the gradients of the parts are joined."""
    return _paired(
        values,
        lambda own: part_of(own, group, dim).clone(),
        lambda grad: all_gather_dim(grad, group, dim),
    )


def _sum(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    summed = values.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed


def _paired(
    values: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    return cast("torch.Tensor", _Paired.apply(values, forward, backward))


class _Paired(torch.autograd.Function):
    """A function of a tensor, and what its gradient goes through on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        forward: Callable[[torch.Tensor], torch.Tensor],
        backward: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.paired = backward
        return forward(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.paired(grads[0]), None, None
