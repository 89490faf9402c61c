"""The calls that move a worker's tensors onto the device and off it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_dtensor_worker import residency
from rl_dtensor_worker.worker_parts import WorkerParts

if TYPE_CHECKING:
    from torch import nn


class ResidencyCalls(WorkerParts):
    """The moves between the states of `rl_interfaces.Residency`."""

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring model and optimizer state onto the device, in train mode."""
        self._place(on_device=True, training_on_device=True)
        self.model.train()
        self._residency.enter("prepare_for_training")

    def prepare_for_lp_inference(self) -> None:
        """Bring the model onto the device, in eval mode, and the optimizer state off it."""
        self._place(on_device=True, training_on_device=False)
        self.model.eval()
        self._residency.enter("prepare_for_lp_inference")

    def offload_before_refit(self) -> None:
        """Keep the model on the device and move the optimizer state off it."""
        self._place(on_device=True, training_on_device=False)
        self._residency.enter("offload_before_refit")

    def offload_after_refit(self) -> None:
        """Move everything off the device."""
        self._transfer.drop_handles()
        self._place(on_device=False, training_on_device=False)
        self.model.eval()
        self._residency.enter("offload_after_refit")

    def move_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move parameters and buffers of `model`, and return it."""
        return self.move_buffer_to_device(model.to(device), device)

    def move_buffer_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move the buffers of `model`, which FSDP leaves alone, and return it."""
        return residency.move_buffers(model, device)

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device, the CPU where there is no GPU, and return it."""
        moved = self.move_to_device(model, self._device)
        residency.free_cached_memory(self._device)
        return moved

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        """Move `model` to the CPU and return it."""
        moved = self.move_to_device(model, "cpu")
        residency.free_cached_memory(self._device)
        return moved

    def _place(self, *, on_device: bool, training_on_device: bool) -> None:
        cpu = torch.device("cpu")
        offload = self._config.cpu_offload
        if not training_on_device:
            residency.drop_gradients(self._training)
        residency.place_training_state(
            self._training, self._device if training_on_device else cpu, cpu_offload=offload
        )
        residency.place_model(self.model, self._device if on_device else cpu, cpu_offload=offload)
        residency.free_cached_memory(self._device)
