"""Optimizer, schedule and loss scale as tensors and plain values, and back.

`torch.distributed.checkpoint.state_dict` is not used for it, see "Optimizer state" in the design
page of the documentation.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch
from torch.optim.lr_scheduler import SequentialLR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.optim.lr_scheduler import LRScheduler


Tensors = dict[str, torch.Tensor]


class Scaler(Protocol):
    """A dynamic loss scale."""

    def state_dict(self) -> dict[str, object]:
        """Return plain values."""
        ...

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore the values of `state_dict`."""
        ...


class PlainState(TypedDict):
    """The training state except its tensors: plain values, which `weights_only=True` loads."""

    classes: dict[str, str]
    """Dotted names of the optimizer's and the schedule's classes."""
    counters: dict[str, object]
    """`{parameter/slot: value}` of optimizer state that is 0-d or not a tensor."""
    groups: list[dict[str, object]]
    """The options of each parameter group."""
    scheduler: dict[str, object]
    scaler: dict[str, object]


@dataclass(kw_only=True, slots=True)
class TrainState:
    """The state of training: a torch optimizer, its schedule and its loss scale."""

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    scaler: Scaler | None = None


def state_of(model: nn.Module, training: TrainState) -> tuple[Tensors, PlainState]:
    """Return the optimizer's tensors as `{parameter/slot: tensor}`, and a copy of all other state.

    The tensors are the optimizer's own, sharded like their parameters.
    """
    tensors, counters = _flatten(model, training.optimizer)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in training.optimizer.param_groups
    ]
    others: PlainState = {
        "classes": _classes(training),
        "counters": counters,
        "groups": groups,
        "scheduler": training.scheduler.state_dict(),
        "scaler": training.scaler.state_dict() if training.scaler is not None else {},
    }
    # A copy, as training changes groups and schedule while a background save writes them.
    return tensors, copy.deepcopy(others)


def check_fits(
    model: nn.Module,
    training: TrainState,
    others: PlainState,
    stored: Mapping[str, TensorStorageMetadata],
) -> None:
    """Raise if the checkpoint does not match this optimizer.

    Raises:
        ValueError: The class of optimizer or schedule, an option or a parameter differs.
    """
    for what, own in _classes(training).items():
        if others["classes"][what] != own:
            raise ValueError(
                f"the save's {what} is {others['classes'][what]}, the config's is {own}"
            )
    options = [set(group) for group in training.optimizer.param_groups]
    saved = [set(group) for group in others["groups"]]
    if len(options) != len(saved) or any(s - o for s, o in zip(saved, options, strict=True)):
        raise ValueError(
            f"the save's optimizer has the options {_sorted(saved)}, "
            f"{type(training.optimizer).__name__} has {_sorted(options)}"
        )
    known = {name for name, _ in _trained(model)}
    if unknown := [name for name in (*stored, *others["counters"]) if _owner(name) not in known]:
        raise ValueError(
            f"{len(unknown)} entries belong to no trained parameter, first {sorted(unknown)[:3]}"
        )


def tensors_to_fill(
    model: nn.Module, training: TrainState, stored: Mapping[str, TensorStorageMetadata]
) -> Tensors:
    """Return a tensor to load each of `stored` into: the optimizer's own, or a new one. Collective.

    A new one is sharded like its parameter, on the device of the optimizer's other tensors.

    Raises:
        ValueError: A stored shape differs.
    """
    present = _flatten(model, training.optimizer)[0]
    devices = [tensor.device for tensor in present.values()]
    parameters, made = dict(_trained(model)), None
    tensors: Tensors = {}
    for name, described in sorted(stored.items()):
        dtype, shape = described.properties.dtype, tuple(described.size)
        known, parameter = present.get(name), parameters[_owner(name)]
        if known is None and shape != tuple(parameter.shape):
            # Such as Adafactor's row and column variances: only a step of the optimizer shows
            # their shapes and shards.
            made = _of_a_first_step(model, training.optimizer) if made is None else made
            known = made.get(name, parameter)
        if known is None or known.dtype != dtype:
            new = torch.zeros_like(
                parameter if known is None else known, dtype=dtype, requires_grad=False
            )
            known = new.to(devices[0]) if devices else new
        if shape != tuple(known.shape):
            raise ValueError(f"{name} has shape {shape}, the optimizer's {tuple(known.shape)}")
        tensors[name] = known
    return tensors


def restore(model: nn.Module, training: TrainState, others: PlainState, tensors: Tensors) -> None:
    """Replace the training state by a save's plain values and loaded `tensors`."""
    optimizer = training.optimizer
    # Before the state is cleared: it shows on which device each counter is kept.
    before = _flatten(model, optimizer)[1]
    # In place: the schedule refers to the same groups.
    for group, options in zip(optimizer.param_groups, others["groups"], strict=True):
        group.update(options)
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    parameters = dict(_trained(model))
    optimizer.state.clear()
    for name, tensor in tensors.items():
        optimizer.state[parameters[_owner(name)]][_slot(name)] = tensor
    for name, value in others["counters"].items():
        parameter = parameters[_owner(name)]
        if isinstance(value, torch.Tensor):
            group = group_of[parameter]
            value = value.to(_counter_device(_slot(name), before.get(name), parameter, group))
        optimizer.state[parameter][_slot(name)] = value
    training.scheduler.load_state_dict(others["scheduler"])
    if training.scaler is not None:
        training.scaler.load_state_dict(others["scaler"])


def _of_a_first_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the state that a copy of the optimizer creates in a step of rate 0 on zero gradients.

    The copy shares the parameters, which such a step leaves unchanged, but not the state.
    """
    first = copy.copy(optimizer)
    first.state = defaultdict(dict)
    first.param_groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]
    for _, parameter in _trained(model):
        parameter.grad = torch.zeros_like(parameter)
    first.step()
    optimizer.zero_grad(set_to_none=True)
    return _flatten(model, first)[0]


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _owner(name: str) -> str:
    return name.rpartition("/")[0]


def _slot(name: str) -> str:
    return name.rpartition("/")[2]


def _classes(training: TrainState) -> dict[str, str]:
    """Return the class names of optimizer and schedule.

    State dicts do not name them, and Adam, for example, loads AdamW's without an error.
    """
    schedule = training.scheduler
    parts = schedule._schedulers if isinstance(schedule, SequentialLR) else [schedule]
    return {
        "optimizer": _name(training.optimizer),
        "scheduler": ", ".join(_name(part) for part in parts),
    }


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _sorted(groups: list[set[str]]) -> list[list[str]]:
    return [sorted(group) for group in groups]


def _counter_device(
    slot: str, before: object, parameter: torch.Tensor, group: dict[str, object]
) -> torch.device:
    """Return the device of a 0-d counter: the present one's, else that of torch's convention."""
    if isinstance(before, torch.Tensor):
        return before.device
    on_device = slot != "step" or group.get("capturable") or group.get("fused")
    return parameter.device if on_device else torch.device("cpu")


def _flatten(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Tensors, dict[str, object]]:
    """Return the tensors with dims, and separately the state that is 0-d or not a tensor."""
    tensors: Tensors = {}
    counters: dict[str, object] = {}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            is_sharded = isinstance(value, torch.Tensor) and value.ndim > 0
            (tensors if is_sharded else counters)[f"{name}/{slot}"] = value
    return tensors, counters
