"""Optimizer, schedule, gradient clipping, and the loss scale of float16."""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rl_interfaces.backend.components import FIRST_LOSS_SCALE, STEPS_BEFORE_GROWTH
from rl_interfaces.backend.engine import OptimizerStep
from torch.distributed.tensor import DTensor, Replicate

from rl_dtensor_worker.parallel.fsdp import local_tensor

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from rl_interfaces import AdamOptions
    from rl_interfaces.backend.checkpoint.optimizer_state import TrainState
    from rl_interfaces.backend.torch_optim import ClassConfig
    from torch import nn


logger = logging.getLogger(__name__)

# One kernel for hundreds of tensors on a GPU, not one for each; torch documents its `_foreach_*`
# functions, and lists none of them.
_norms = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
_multiply = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
_divide = torch._foreach_div_  # pyright: ignore[reportPrivateImportUsage]


def build_optimizer(model: nn.Module, config: ClassConfig) -> torch.optim.Optimizer:
    """Return the optimizer over every trainable parameter."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return config.cls(trainable, **config.kwargs)


@torch.no_grad()
def total_grad_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients, over all ranks, as a 0-d float32 tensor. Collective.

    The squares of a sharded gradient are summed over the ranks that shard it; a replicated one
    counts once. Gradients may be on different meshes, which torch's own clipping does not support.
    """
    # Gradients of one set of groups are summed locally first: one all-reduce per group, not per
    # parameter.
    shards: dict[tuple[str, ...], list[torch.Tensor]] = defaultdict(list)
    groups: dict[str, dist.ProcessGroup] = {}
    for gradient in gradients:
        sharding = _sharding_groups(gradient)
        groups |= sharding
        shards[tuple(sharding)].append(local_tensor(gradient))
    totals: list[torch.Tensor] = []
    for names, parts in shards.items():
        # In float64, so that the order of the sum, and with it the sharding, leaves the norm's
        # float32 as it is: clipping by another norm would give the same seed another run.
        norms = _norms(parts, 2, dtype=torch.float64)
        total = torch.stack(list(norms)).square().sum()
        for name in names:
            dist.all_reduce(total, group=groups[name])
        totals.append(total)
    return torch.stack(totals).sum().sqrt().float() if totals else torch.zeros(())


@torch.no_grad()
def sum_gradients(parameters: Iterable[torch.Tensor], *, group: dist.ProcessGroup) -> None:
    """Sum the gradients over ranks that have a copy of the parameters each, in place. Collective.

    A rank whose rows have not used a parameter counts as zero; a parameter that no rank has used
    gets no gradient.

    Args:
        parameters: The trainable parameters, in the same order on every rank.
        group: The ranks.
    """
    parameters = list(parameters)
    if not parameters:
        return
    # One all-reduce for all of them, with the number of ranks that have each at its end.
    device = parameters[0].device
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32)
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(part.flatten() for part in parts), used.to(device)])
    dist.all_reduce(flat, group=group)
    *sums, used = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, total, count in zip(parameters, sums, used.tolist(), strict=True):
        # Its own gradient says enough, also where a plan of memory knows no values.
        is_used = parameter.grad is not None or count > 0
        parameter.grad = total.view_as(parameter) if is_used else None


def clip_gradients(
    parameters: Sequence[torch.Tensor], *, max_norm: float | None, norm: torch.Tensor
) -> None:
    """Scale the gradients so that their norm is at most `max_norm`; None or 0 leaves them."""
    if not max_norm:
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients = _local_gradients(parameters)
    if gradients:
        # All are on one device: each parameter is offloaded, or none.
        _multiply(gradients, factor.to(gradients[0].device))


class DTensorOptimizer:
    """An optimizer over DTensors: a `rl_interfaces.backend.engine.EngineOptimizer`.

    Args:
        model: Its gradients are those that count.
        state: The optimizer over its trainable parameters, with schedule and loss scale.
        scaler: The loss scale of `state`.
        max_grad_norm: Largest 2-norm of all gradients; None or 0 leaves them as they are.
        group: The ranks whose gradients a step sums; None: FSDP has summed them, or there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        state: TrainState,
        *,
        scaler: LossScaler,
        max_grad_norm: float | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.state = state
        self.scaler = scaler
        self._model = model
        self._max_grad_norm = max_grad_norm
        self._group = group

    @contextmanager
    def with_adam(self, options: AdamOptions) -> Generator[None, None, None]:
        """Step with the given settings inside, and with the optimizer's own again afterwards."""
        (group,) = self.state.optimizer.param_groups
        given = {key: options[key] for key in ("lr", "betas", "eps", "weight_decay")}
        before, max_grad_norm = {key: group[key] for key in given}, self._max_grad_norm
        group.update(given)
        self._max_grad_norm = options["max_grad_norm"]
        try:
            yield
        finally:
            group.update(before)
            self._max_grad_norm = max_grad_norm

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return self.state.optimizer.param_groups[0]["lr"]

    def step(self, *, discard: bool, divisor: float = 1.0) -> OptimizerStep:
        """See `EngineOptimizer.step`."""
        trained = [p for p in self._model.parameters() if p.requires_grad]
        if self._group is not None:
            sum_gradients(trained, group=self._group)
        parameters = [p for p in trained if p.grad is not None]
        self.scaler.unscale(parameters)
        if divisor != 1.0 and (gradients := _local_gradients(parameters)):
            _divide(gradients, divisor)
        norm = total_grad_norm(p.grad for p in parameters if p.grad is not None)
        finite = bool(torch.isfinite(norm))
        stepped = finite and not discard
        if stepped:
            clip_gradients(parameters, max_norm=self._max_grad_norm, norm=norm)
            self.state.optimizer.step()
        elif not finite and self.scaler.enabled:
            logger.warning(
                "The gradients are not finite under the float16 loss scale %g: it is halved to %g",
                self.scaler.scale,
                max(self.scaler.scale / 2, 1.0),
            )
        self.scaler.update(finite=finite)
        self.clear_gradients()
        return OptimizerStep(grad_norm=norm, stepped=stepped)

    def clear_gradients(self) -> None:
        """See `EngineOptimizer.clear_gradients`."""
        self.state.optimizer.zero_grad(set_to_none=True)

    def advance_schedule(self) -> None:
        """See `EngineOptimizer.advance_schedule`."""
        self.state.scheduler.step()


class LossScaler:
    """The dynamic loss scale of float16; for other dtypes the scale is 1 and stays 1.

    The scale halves after a step whose gradients are not finite and doubles after
    `growth_interval` steps in a row whose gradients are (Micikevicius et al. 2018, "Mixed
    Precision Training", section 3.2).
    """

    def __init__(
        self, compute_dtype: torch.dtype, *, growth_interval: int = STEPS_BEFORE_GROWTH
    ) -> None:
        self.enabled = compute_dtype is torch.float16
        self.scale = FIRST_LOSS_SCALE if self.enabled else 1.0
        self.growth_interval = growth_interval
        self.good_steps = 0

    def unscale(self, parameters: Sequence[torch.Tensor]) -> None:
        """Divide the gradients by the scale."""
        if self.enabled and (gradients := _local_gradients(parameters)):
            _divide(gradients, self.scale)

    def update(self, *, finite: bool) -> None:
        """Adjust the scale after a step whose gradients were finite, or not."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, object]:
        """Return what `load_state_dict` takes."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore what `state_dict` returned."""
        if self.enabled:
            scale, good_steps = state["scale"], state["good_steps"]
            assert isinstance(scale, float)
            assert isinstance(good_steps, int)
            self.scale, self.good_steps = scale, good_steps


def _local_gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [local_tensor(each.grad) for each in parameters if each.grad is not None]


def _sharding_groups(tensor: torch.Tensor) -> dict[str, dist.ProcessGroup]:
    """Return the groups that shard `tensor`, by name.

    Names identify groups consistently; DTensor may make new group objects at each call.
    """
    if not isinstance(tensor, DTensor):
        return {}
    mesh = tensor.device_mesh
    sharding = (
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate) and mesh.size(axis) > 1
    )
    return {group.group_name: group for group in sharding}
