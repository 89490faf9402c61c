"""An optimizer of torch over replicated parameters: the simplest `EngineOptimizer`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rl_interfaces.backend.checkpoint.optimizer_state import TrainState
from rl_interfaces.backend.engine import OptimizerStep


class ReplicatedOptimizer:
    """Sums gradients over the data-parallel ranks, clips them and steps.

    Args:
        parameters: The trainable parameters, of which every rank of `group` has a full copy.
        state: The optimizer over them, and its schedule.
        max_grad_norm: Largest 2-norm of all gradients; None leaves them as they are.
        group: The data-parallel ranks.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        state: TrainState,
        *,
        max_grad_norm: float | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.state = state
        self._parameters = list(parameters)
        self._max_norm = max_grad_norm or float("inf")
        self._group = group

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return self.state.optimizer.param_groups[0]["lr"]

    def step(self, *, discard: bool) -> OptimizerStep:
        """See `EngineOptimizer.step`."""
        for parameter in self._parameters:
            if parameter.grad is None:
                # Ranks may have seen other rows, and all take part in every sum.
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self._group)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        stepped = bool(norm.isfinite()) and not discard
        if stepped:
            self.state.optimizer.step()
        self.state.optimizer.zero_grad(set_to_none=True)
        return OptimizerStep(grad_norm=norm.float(), stepped=stepped)

    def advance_schedule(self) -> None:
        """See `EngineOptimizer.advance_schedule`."""
        self.state.scheduler.step()
