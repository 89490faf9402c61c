"""What lives on the device in each residency state, and the moves between them."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch
from torch import nn

from rl_dtensor_worker.optim import move_optimizer_state

if TYPE_CHECKING:
    from rl_dtensor_worker.train_step import TrainingParts

_CPU = torch.device("cpu")


def place_model(model: nn.Module, device: torch.device, *, cpu_offload: bool) -> None:
    """Move the model to `device`; under FSDP's CPU offload its parameters stay, buffers move."""
    if not cpu_offload:
        model.to(device)
    move_buffers(model, device)


def place_training_state(
    training: TrainingParts | None, device: torch.device, *, cpu_offload: bool
) -> None:
    """Move the optimizer state to `device`, or to the CPU under FSDP's CPU offload."""
    if training is not None:
        move_optimizer_state(training.optimizer, _CPU if cpu_offload else device)


def drop_gradients(training: TrainingParts | None) -> None:
    """Free the gradients."""
    if training is not None:
        training.optimizer.zero_grad(set_to_none=True)


def move_buffers(model: nn.Module, device: str | torch.device) -> nn.Module:
    """Move the buffers, which FSDP leaves alone, and return the model."""
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return model


def free_cached_memory(device: torch.device) -> None:
    """Return the memory that the allocator caches to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
