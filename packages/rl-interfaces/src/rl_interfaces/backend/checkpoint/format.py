"""What a backend writes into the directories of a save, and reads from them.

`TensorFormat` is the format of every backend whose optimizer is torch's: weights and optimizer
tensors are safetensors shards in the layout of `torch.distributed.checkpoint`, so that any layout
of ranks reads them; `state.pt` (groups, counters, schedule, loss scale) and `random_N.pt` (the
random state of data-parallel rank N) hold plain values and are read with `weights_only=True`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from rl_interfaces.backend.checkpoint import optimizer_state
from rl_interfaces.backend.checkpoint.optimizer_state import TrainState
from rl_interfaces.backend.checkpoint.saves import reason_of
from rl_interfaces.backend.runtime.agreement import failing_together

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
FileWriters = dict[str, Callable[[Path], Any]]
"""What writes each file, given its path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRandomState:
    """The random state that a save holds for one data-parallel rank."""

    data_parallel_rank: int
    is_written_here: bool
    """On one of the ranks that hold the same rows."""
    state: Tensors

    @property
    def file_name(self) -> str:
        """Name of its file."""
        return f"random_{self.data_parallel_rank}.pt"


class SavePart(Protocol):
    """One directory of a save, and what this rank writes into it."""

    @property
    def target(self) -> Path:
        """Where the directory is renamed to once the save is complete."""
        ...

    def staged(self) -> SavePart:
        """Return the same with copies of the state, which training leaves alone."""
        ...

    def write(self, directory: Path, group: dist.ProcessGroup) -> None:
        """Write into `directory`. Collective over `group`, whose ranks are on the CPU."""
        ...


class CheckpointFormat(Protocol):
    """The state of one rank as a save holds it. Every method is collective."""

    def parts(
        self, weights: Path, training: Path | None, random_state: RankRandomState
    ) -> Sequence[SavePart]:
        """Return what is saved: the weights, then the training state where a path is given."""
        ...

    def load(
        self, weights: Path, training: Path | None, random_state: RankRandomState
    ) -> Tensors | None:
        """Read both into the engine; return the random state of this rank, None where none fits.

        Raises:
            ValueError: A directory is no checkpoint of this model or optimizer; nothing changed.
        """
        ...


@dataclass(slots=True)
class TensorPart:
    """A `SavePart` of tensors, DTensors among them, and small files."""

    target: Path
    tensors: Tensors
    files: FileWriters

    def staged(self) -> TensorPart:
        """See `SavePart.staged`; the copies are on the CPU."""
        on_cuda = any(tensor.is_cuda for tensor in self.tensors.values())
        options = StagingOptions(
            use_pinned_memory=on_cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_cuda,
        )
        stager = DefaultStager(options)
        copies: Any = stager.stage(self.tensors)
        stager.close()
        return TensorPart(self.target, copies, self.files)

    def write(self, directory: Path, group: dist.ProcessGroup) -> None:
        """See `SavePart.write`."""
        if self.tensors:
            writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
            save_sharded(self.tensors, storage_writer=writer, process_group=group)
        with failing_together(group):
            for name, write in self.files.items():
                write(directory / name)


@dataclass(kw_only=True, slots=True)
class TensorFormat:
    """The `CheckpointFormat` of an engine with an optimizer of torch."""

    model: nn.Module
    training: TrainState | None
    weights: Callable[[], Tensors]
    """The tensors that are saved as the weights; a load fills them in place."""
    files: Callable[[], FileWriters] = field(default=dict)
    """What else lies beside the weights; asked for on the first rank alone."""
    check: Callable[[Path], None] | None = None
    """Raises `ValueError` where the directory's files are of another model."""

    def parts(
        self, weights: Path, training: Path | None, random_state: RankRandomState
    ) -> list[TensorPart]:
        """See `CheckpointFormat.parts`."""
        is_first = dist.get_rank() == 0
        parts = [TensorPart(weights, self.weights(), self.files() if is_first else {})]
        if training is not None and self.training is not None:
            tensors, others = optimizer_state.state_of(self.model, self.training)
            files: FileWriters = {}
            if is_first:
                files["state.pt"] = lambda path: torch.save(others, path)
            if random_state.is_written_here:
                files[random_state.file_name] = lambda path: torch.save(random_state.state, path)
            parts.append(TensorPart(training, tensors, files))
        return parts

    def load(
        self, weights: Path, training: Path | None, random_state: RankRandomState
    ) -> Tensors | None:
        """See `CheckpointFormat.load`."""
        targets = self.weights()
        saved: tuple[dict[str, Any], Tensors] | None = None
        # Everything is checked on all ranks before anything is overwritten on any.
        with failing_together():
            if self.check is not None:
                self.check(weights)
            check_tensors(targets, weights, what="weights_path")
            if self.training is not None and training is not None:
                saved = _read_training_state(self.model, self.training, training)
        random: Tensors | None = None
        if self.training is not None and training is not None and saved is not None:
            others, tensors = saved
            if tensors:
                _load_tensors(tensors, training, what="optimizer_path")
            optimizer_state.restore(self.model, self.training, others, tensors)
            random = _load_random(training / random_state.file_name)
        _load_tensors(targets, weights, what="weights_path")
        return random


def check_tensors(tensors: Mapping[str, torch.Tensor], path: Path, *, what: str) -> None:
    """Raise unless the directory holds exactly these tensors, in these shapes.

    Raises:
        ValueError: It does not; the message names the first tensors that differ.
    """
    stored = _stored_tensors(path)
    missing = sorted(tensors.keys() - stored.keys())
    if missing:
        raise ValueError(f"{what}={str(path)!r} lacks {len(missing)} tensors, first {missing[:3]}")
    beyond = sorted(stored.keys() - tensors.keys())
    if beyond:
        raise ValueError(
            f"{what}={str(path)!r} is of another model: it has {len(beyond)} tensors beyond this "
            f"one's, first {beyond[:3]}"
        )
    for name, tensor in tensors.items():
        shape = tuple(stored[name].size)
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"{what}={str(path)!r}: {name} has shape {shape}, "
                f"the model's has {tuple(tensor.shape)}"
            )


def _load_tensors(tensors: Tensors, path: Path, *, what: str) -> None:
    try:
        with torch.no_grad():
            load_sharded(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
    except CheckpointException as error:
        raise RuntimeError(f"{what}={str(path)!r} was not loaded: {reason_of(error)}") from error


def _stored_tensors(path: Path) -> dict[str, Any]:
    return HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata


def _read_training_state(
    model: nn.Module, training: TrainState, path: Path
) -> tuple[dict[str, Any], Tensors]:
    """Return what the directory holds besides its tensors, and the tensors to read into."""
    others = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
    stored = _stored_tensors(path)
    try:
        optimizer_state.check_fits(model, training, others, stored)
        return others, optimizer_state.tensors_to_fill(model, training, stored)
    except ValueError as error:
        raise ValueError(f"optimizer_path={str(path)!r}: {error}") from error


def _load_random(path: Path) -> Tensors | None:
    if not path.is_file():
        logger.warning("%s is not there: the random state of this rank starts anew", path)
        return None
    return torch.load(path, weights_only=True)
