"""Scoped monkey patches, and the Adam that stands in for Transformer Engine's and Apex's."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch.optim import Optimizer
from torch.optim.adam import adam

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from contextlib import AbstractContextManager
    from types import ModuleType

    from torch.optim.optimizer import ParamsT

Patch = tuple["ModuleType", str, object]
"""Owner, attribute name, replacement. The attribute is looked up on the owner itself."""

_ABSENT = object()


class Patches:
    """A reference-counted set of patches, entered per thread and reentrant.

    Attributes are process-global: they stay replaced for all threads while any thread is inside.

    Args:
        patches: The replacements. A missing attribute is added, and removed afterwards.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches
        self._originals: list[Patch] = []
        self._lock = threading.Lock()
        self._num_threads = 0
        self._thread = threading.local()

    @property
    def entered(self) -> bool:
        """Whether this thread is inside."""
        return getattr(self._thread, "entered", False)

    @contextmanager
    def applied(self) -> Generator[None, None, None]:
        """Apply the patches inside."""
        # Entered again in this thread: the outermost one undoes.
        if self.entered:
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            # Only the first thread saves the originals: a second one would save replacements.
            if self._num_threads == 0:
                for owner, name, replacement in self._patches:
                    self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
                    setattr(owner, name, replacement)
            self._num_threads += 1
        self._thread.entered = True

    def _leave(self) -> None:
        self._thread.entered = False
        with self._lock:
            self._num_threads -= 1
            # In reverse order, in case an attribute is patched twice.
            while self._num_threads == 0 and self._originals:
                owner, name, original = self._originals.pop()
                if original is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


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
        capturable: False, as Megatron-core 0.19 passes it: steps are not for CUDA graphs.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert not capturable
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
            # As in torch, a parameter without a gradient is left alone, decay included.
            trained = [each for each in group["params"] if each.grad is not None]
            if trained:
                group["step"] = group.get("step", 0) + 1
                self._step_group(group, trained)
        return None

    def _step_group(self, group: dict[str, Any], trained: list[torch.Tensor]) -> None:
        for parameter in trained:
            state = self.state[parameter]
            if not state:
                # The names that Megatron-core's checkpoints have for the two moments.
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        adam(
            trained,
            [each.grad for each in trained if each.grad is not None],
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


def _missing_packages() -> list[Patch]:
    needed: list[Patch] = []
    # Megatron-core decides at import time that its Adam is torch's, and then refuses to load the
    # state of a distributed optimizer: these flags say that it has a FusedAdam after all.
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        needed += [
            (megatron_optimizer, "Adam", GroupStepAdam),
            (megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),
            (distrib_optimizer, "Adam", GroupStepAdam),
            (distrib_optimizer, "HAVE_APEX_OR_TE", True),
            (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
        ]
    if not hasattr(moe_utils, "te_general_gemm"):
        # The MoE router tests it against None, and 0.16.1 leaves it unbound.
        needed.append((moe_utils, "te_general_gemm", None))
    if not isinstance(multi_latent_attention.TELinear, type):
        # Without Transformer Engine it is a mock, and 0.16.1 takes that for the class.
        needed.append((multi_latent_attention, "HAVE_TE", False))
    return needed


_engine_patches = Patches(_missing_packages())


def engine_stand_ins() -> AbstractContextManager[None]:
    """Return the scope in which Megatron-core trains without Transformer Engine and Apex.

    `GroupStepAdam` replaces their FusedAdam, so that the distributed optimizer can save and load.
    An installed package is left alone.
    """
    return _engine_patches.applied()
