"""Collectives that a backward pass can go through, over a dimension of the caller's choice.

Each pairs with its own backward for activations that every rank of the group computes alike, as in
Shoeybi et al. 2019, "Megatron-LM", section 3: what is the sum of all ranks going forward needs no
sum coming back, and the other way round.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

# Their names since torch 2.13, which warns of the others.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_dim(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return the ranks' `values`, of one shape, joined along `dim`."""
    own = values.movedim(dim, 0).contiguous()
    joined = own.new_empty((own.shape[0] * group.size(), *own.shape[1:]))
    _all_gather(joined, own, group=group)
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
    return cast("torch.Tensor", _CopyToRanks.apply(values, group))


def sum_over_ranks(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the ranks' `values`; the gradient, which is theirs all, is passed on."""
    return cast("torch.Tensor", _SumOverRanks.apply(values, group))


def gather_parts(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Join the ranks' parts for use by each in its own way: gradients are summed, and cut."""
    return cast("torch.Tensor", _GatherParts.apply(values, group, dim))


def scatter_sum(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's part of the ranks' sum; the gradients of the parts are joined."""
    return cast("torch.Tensor", _ScatterSum.apply(values, group, dim))


def gather_alike(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Join the ranks' parts for use by all in the same way: the gradient is cut, not summed."""
    return cast("torch.Tensor", _GatherAlike.apply(values, group, dim))


def take_part(values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's part of what all ranks have; the gradients of the parts are joined."""
    return cast("torch.Tensor", _TakePart.apply(values, group, dim))


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = grads[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed = values.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather_dim(values, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter_dim(grads[0], ctx.group, ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter_dim(values, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather_dim(grads[0], ctx.group, ctx.dim), None, None


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather_dim(values, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return part_of(grads[0], ctx.group, ctx.dim), None, None


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return part_of(values, group, dim).clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather_dim(grads[0], ctx.group, ctx.dim), None, None
