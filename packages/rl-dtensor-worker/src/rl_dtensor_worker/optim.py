"""Optimizer, schedule, gradient clipping, and the loss scale of float16."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR

from rl_dtensor_worker.parallel.fsdp import local_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from rl_dtensor_worker.config import ClassConfig, SchedulerConfig


def build_optimizer(model: nn.Module, config: ClassConfig) -> torch.optim.Optimizer:
    """Return the optimizer over every trainable parameter."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return config.cls(trainable, **config.kwargs)


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: SchedulerConfig | None
) -> LRScheduler:
    """Return the learning-rate schedule, which steps once per `train` call; constant for None."""
    if config is None:
        return LambdaLR(optimizer, _constant)
    parts = [part.cls(optimizer, **part.kwargs) for part in config.parts]
    if len(parts) == 1:
        return parts[0]
    return SequentialLR(optimizer, parts, milestones=list(config.milestones))


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state tensors to `device`; the 0-d counters stay where the optimizer put them."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                state[key] = value.to(device)


@torch.no_grad()
def total_grad_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients, over all ranks, as a 0-d float32 tensor. Collective.

    Squares are summed over the ranks among which a gradient is cut, and counted once where each
    rank has all of it.
    """
    squares: dict[tuple[str, ...], list[torch.Tensor]] = defaultdict(list)
    groups: dict[str, dist.ProcessGroup] = {}
    for gradient in gradients:
        cutting = _groups_that_cut(gradient)
        groups |= cutting
        norm = torch.linalg.vector_norm(local_tensor(gradient).float())
        squares[tuple(cutting)].append(norm**2)
    totals: list[torch.Tensor] = []
    for names, parts in squares.items():
        total = torch.stack(parts).sum()
        for name in names:
            dist.all_reduce(total, group=groups[name])
        totals.append(total)
    return torch.stack(totals).sum().sqrt() if totals else torch.zeros(())


def clip_gradients(
    parameters: Sequence[torch.Tensor], *, max_norm: float | None, norm: torch.Tensor
) -> None:
    """Scale the gradients so that their norm is at most `max_norm`; None or 0 leaves them."""
    if not max_norm:
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local_tensor(parameter.grad).mul_(factor.to(parameter.grad.device))


class LossScaler:
    """The dynamic loss scale of float16; for other dtypes the scale is 1 and stays 1.

    The scale halves after a step whose gradients are not finite and doubles after
    `growth_interval` steps in a row whose gradients are (Micikevicius et al. 2018, "Mixed
    Precision Training", section 3.2).
    """

    def __init__(self, compute_dtype: torch.dtype, *, growth_interval: int = 2000) -> None:
        self.enabled = compute_dtype is torch.float16
        self.scale = 2.0**16 if self.enabled else 1.0
        self.growth_interval = growth_interval
        self.good_steps = 0

    def unscale(self, parameters: Sequence[torch.Tensor]) -> None:
        """Divide the gradients by the scale."""
        if self.enabled:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.scale)

    def update(self, *, finite: bool) -> None:
        """Learn whether the last step's gradients were finite."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        if self.enabled:
            self.scale, self.good_steps = state["scale"], state["good_steps"]


def _groups_that_cut(tensor: torch.Tensor) -> dict[str, dist.ProcessGroup]:
    """Return the groups of ranks that have parts of `tensor`, by their names.

    Names tell groups apart on every rank alike; the objects may be made anew at each call.
    """
    if not isinstance(tensor, DTensor):
        return {}
    mesh = tensor.device_mesh
    cutting = (
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate) and mesh.size(axis) > 1
    )
    return {group.group_name: group for group in cutting}


def _constant(step: int) -> float:
    return 1.0
