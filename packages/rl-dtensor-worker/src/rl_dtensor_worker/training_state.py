"""Optimizer, schedule and loss scale as tensors and plain values, and back."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

    from rl_dtensor_worker.train_step import TrainingParts

Tensors = dict[str, torch.Tensor]


def state_of(model: nn.Module, training: TrainingParts) -> tuple[Tensors, dict[str, Any]]:
    """Return the optimizer's tensors as `{parameter/slot: tensor}`, and a copy of all else.

    The tensors are the optimizer's own, sharded as their parameters are.
    """
    tensors, counters = _flatten(model, training.optimizer)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in training.optimizer.param_groups
    ]
    others = {
        "counters": counters,
        "groups": groups,
        "scheduler": training.scheduler.state_dict(),
        "scaler": training.scaler.state_dict(),
    }
    return tensors, copy.deepcopy(others)


def tensors_to_fill(model: nn.Module, training: TrainingParts, others: dict[str, Any]) -> Tensors:
    """Return the optimizer's tensors, which it has created, to be filled in place."""
    if not others["counters"]:
        return {}  # It was saved before its first step.
    _materialise(training.optimizer)
    return _flatten(model, training.optimizer)[0]


def restore(model: nn.Module, training: TrainingParts, others: dict[str, Any]) -> None:
    """Take up what `state_of` returned besides the tensors."""
    counters = others["counters"]
    for name, parameter in model.named_parameters():
        state = training.optimizer.state.get(parameter, {}) if counters else {}
        for slot, value in state.items():
            if not _is_array(value):
                saved = counters[f"{name}/{slot}"]
                on_device = isinstance(value, torch.Tensor)
                state[slot] = saved.to(value.device) if on_device else saved
    for group, options in zip(training.optimizer.param_groups, others["groups"], strict=True):
        group.update(options)
    training.scheduler.load_state_dict(others["scheduler"])
    training.scaler.load_state_dict(others["scaler"])


def _flatten(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors, and apart what is 0-d or no tensor."""
    tensors: Tensors = {}
    counters: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            (tensors if _is_array(value) else counters)[f"{name}/{slot}"] = value
    return tensors, counters


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer create its state, by a step of zero rate over zero gradients."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with warnings.catch_warnings():
        # The schedule has not begun: that no scheduler follows this step is meant.
        warnings.simplefilter("ignore", UserWarning)
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
