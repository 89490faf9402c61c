"""Checkpoints: sharded safetensors, written beside their place and renamed into it.

Weights are a directory of safetensors shards in the layout of `torch.distributed.checkpoint`, which
any other layout of ranks can read. The optimizer's directory holds its tensors in the same way,
`state.pt` (groups, counters, schedule, loss scale) and `random_RANK.pt` (random states). Both `.pt`
files hold plain values and are read with `weights_only=True`.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from rl_dtensor_worker.fsdp import full_tensor
from rl_dtensor_worker.model import persistent_state

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rl_dtensor_worker.train_step import TrainingParts

logger = logging.getLogger(__name__)


def save_weights(model: nn.Module, path: str | Path) -> None:
    """Write every rank's shards of the weights, and the model's config. Collective."""
    with atomic_directory(path) as directory:
        _save_tensors(persistent_state(model), directory)
        if dist.get_rank() == 0:
            model.config.save_pretrained(directory)  # type: ignore[union-attr, operator]


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Read weights that any layout has written into the model's shards, in place. Collective.

    Raises:
        ValueError: The directory is no checkpoint of this model; the message names what differs.
    """
    _load_tensors(persistent_state(model), path, what="weights_path")


def save_training_state(
    model: nn.Module,
    training: TrainingParts,
    path: str | Path,
    *,
    random_state: dict[str, torch.Tensor],
) -> None:
    """Write optimizer, schedule, loss scale and this rank's random state. Collective."""
    tensors, counters = _flatten_optimizer(model, training.optimizer)
    small = {
        "counters": counters,
        "groups": [_group_options(group) for group in training.optimizer.param_groups],
        "scheduler": training.scheduler.state_dict(),
        "scaler": training.scaler.state_dict(),
    }
    with atomic_directory(path) as directory:
        _save_tensors(tensors, directory)
        _save_small(random_state, directory / f"random_{dist.get_rank()}.pt")
        if dist.get_rank() == 0:
            _save_small(small, directory / "state.pt")


def load_training_state(
    model: nn.Module, training: TrainingParts, path: str | Path
) -> dict[str, torch.Tensor] | None:
    """Read what `save_training_state` wrote; return this rank's random state, if it has one.

    Raises:
        ValueError: The directory is no training state of this model and optimizer.
    """
    directory = Path(path)
    if not (directory / "state.pt").is_file():
        raise ValueError(f"optimizer_path={str(path)!r} has no state.pt: not a training state")
    small = torch.load(directory / "state.pt", weights_only=True)
    if small["counters"]:
        _materialise_state(training.optimizer)
        tensors, _ = _flatten_optimizer(model, training.optimizer)
        _load_tensors(tensors, directory, what="optimizer_path")
        _restore_counters(model, training.optimizer, small["counters"])
    for group, options in zip(training.optimizer.param_groups, small["groups"], strict=True):
        group.update(options)
    training.scheduler.load_state_dict(small["scheduler"])
    training.scaler.load_state_dict(small["scaler"])
    random_path = directory / f"random_{dist.get_rank()}.pt"
    if not random_path.is_file():
        logger.warning("%s is not there: the random state of this rank starts anew", random_path)
        return None
    return torch.load(random_path, weights_only=True)


def save_hf_directory(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str | Path
) -> None:
    """Write a directory that transformers loads, in float32. Collective.

    Tensors are gathered one at a time; the first rank holds the whole on its CPU.
    """
    is_writer = dist.get_rank() == 0
    state: dict[str, torch.Tensor] = {}
    for name, tensor in persistent_state(model).items():
        whole = full_tensor(tensor)
        if is_writer:
            state[name] = whole.cpu()
    with atomic_directory(path) as directory:
        if is_writer:
            model.save_pretrained(directory, state_dict=state)
            tokenizer.save_pretrained(directory)


@contextmanager
def atomic_directory(path: str | Path) -> Generator[Path, None, None]:
    """Yield a directory beside `path` that takes its place when every rank has left in order.

    A crash leaves what stood at `path` as it was. Collective: all ranks enter and leave together.
    """
    target = Path(path).absolute()
    beside = target.with_name(f"{target.name}.partial")
    if dist.get_rank() == 0:
        if beside.exists():
            shutil.rmtree(beside)
        beside.mkdir(parents=True)
    dist.barrier()
    yield beside
    dist.barrier()
    if dist.get_rank() == 0:
        replace_directory(beside, target)
    dist.barrier()


def replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`; an older `target` is set aside first and removed afterwards."""
    old = target.with_name(f"{target.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if target.exists():
        target.rename(old)
    source.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if old.exists():
        shutil.rmtree(old)


def _save_tensors(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    if tensors:
        writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
        save_sharded(tensors, storage_writer=writer)


def _load_tensors(tensors: dict[str, torch.Tensor], path: str | Path, *, what: str) -> None:
    if not any(Path(path).glob("*.safetensors")):
        raise ValueError(f"{what}={str(path)!r} has no safetensors files: not a checkpoint")
    reader = HuggingFaceStorageReader(str(path))
    stored = reader.read_metadata().state_dict_metadata
    missing = sorted(tensors.keys() - stored.keys())
    if missing:
        raise ValueError(f"{what}={str(path)!r} lacks {len(missing)} tensors, first {missing[:3]}")
    for name, tensor in tensors.items():
        if tuple(stored[name].size) != tuple(tensor.shape):  # type: ignore[union-attr]
            raise ValueError(
                f"{what}={str(path)!r}: {name} has shape {tuple(stored[name].size)}, "  # type: ignore[union-attr]
                f"the model's has {tuple(tensor.shape)}"
            )
    with torch.no_grad():
        load_sharded(tensors, storage_reader=HuggingFaceStorageReader(str(path)))


def _flatten_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state as `{parameter/slot: tensor}`, and apart what is 0-d or no tensor."""
    tensors: dict[str, torch.Tensor] = {}
    counters: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            is_array = isinstance(value, torch.Tensor) and value.ndim > 0
            (tensors if is_array else counters)[f"{name}/{slot}"] = value
    return tensors, counters


def _restore_counters(
    model: nn.Module, optimizer: torch.optim.Optimizer, counters: dict[str, Any]
) -> None:
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if not (isinstance(value, torch.Tensor) and value.ndim > 0):
                optimizer.state[parameter][slot] = counters[f"{name}/{slot}"]


def _materialise_state(optimizer: torch.optim.Optimizer) -> None:
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


def _group_options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _save_small(value: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
