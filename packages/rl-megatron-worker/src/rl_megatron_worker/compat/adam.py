"""Adam as Megatron-core's optimizers and checkpoints expect it, in torch's arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch.optim import Optimizer
from torch.optim.adam import adam

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class GroupStepAdam(Optimizer):
    """Adam that counts steps per parameter group, like Transformer Engine's and Apex's FusedAdam.

    Megatron-core's distributed optimizer saves and loads that layout only; so checkpoints written
    with and without Transformer Engine are interchangeable.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        adam_w_mode: Whether weight decay is decoupled, as in AdamW.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._decoupled = adam_w_mode

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            if trained:
                group["step"] = group.get("step", 0) + 1
                self._step_group(group, trained)
        return None

    def _step_group(self, group: dict[str, Any], trained: list[torch.Tensor]) -> None:
        for parameter in trained:
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        gradients: list[Any] = [each.grad for each in trained]
        adam(
            trained,
            gradients,
            [self.state[each]["exp_avg"] for each in trained],
            [self.state[each]["exp_avg_sq"] for each in trained],
            [],
            # Torch increments the step itself.
            [torch.tensor(float(group["step"] - 1)) for _ in trained],
            decoupled_weight_decay=self._decoupled,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
