"""The calls that move a worker's tensors onto the device and off it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from rl_interfaces import ResidencyState

from rl_megatron_worker.residency import place_parameters
from rl_megatron_worker.worker_parts import WorkerParts

if TYPE_CHECKING:
    from collections.abc import Generator


class ResidencyCalls(WorkerParts):
    """The moves between the states of `rl_interfaces.Residency`."""

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring model and optimizer state onto the device, in train mode."""
        self._place(model=True, training=True)
        self._set_mode(training=True)
        self._residency.enter("prepare_for_training")

    def prepare_for_lp_inference(self) -> None:
        """Bring the model onto the device, in eval mode, and the optimizer state off it."""
        self._place(model=True, training=False)
        self._set_mode(training=False)
        self._residency.enter("prepare_for_lp_inference")

    def offload_before_refit(self) -> None:
        """Keep the model on the device and move the optimizer state off it."""
        self._place(model=True, training=False)
        self._residency.enter("offload_before_refit")

    def offload_after_refit(self) -> None:
        """Move everything off the device."""
        self._transfer.drop_handles()
        self._place(model=False, training=False)
        self._set_mode(training=False)
        self._residency.enter("offload_after_refit")

    def _set_mode(self, *, training: bool) -> None:
        for chunk in self.model:
            chunk.train(training)

    @contextmanager
    def _on_device(self) -> Generator[None, None, None]:
        """Have model and optimizer state on the device inside, and then where they were."""
        state = self._residency.state
        self._place(model=True, training=True)
        try:
            yield
        finally:
            self._place(
                model=state is not ResidencyState.OFFLOADED,
                training=state is ResidencyState.TRAINING,
            )

    def _place(self, *, model: bool, training: bool) -> None:
        """Have on the device what is asked for, and the rest on the CPU."""
        if self._trainer is not None and not training:
            self._trainer.release_gradients()
            self._trainer.move_state(torch.device("cpu"))
        place_parameters(self.model, self._runtime, on_device=model)
        if self._trainer is not None and training:
            self._trainer.move_state(self._device)
            self._trainer.restore_gradients()
        self._runtime.free_cached_memory()
