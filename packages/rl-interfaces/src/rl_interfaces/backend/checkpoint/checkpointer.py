"""What a backend writes into the directories of a save, and reads from them.

`TensorFormat` is the format of every backend whose optimizer is torch's: weights and optimizer
tensors are safetensors shards in the layout of `torch.distributed.checkpoint`, so that any layout
of ranks reads them; `state.pt` (groups, counters, schedule, loss scale) and `random_N.pt` (the
random state of data-parallel rank N) hold plain values and are read with `weights_only=True`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
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

from rl_interfaces.backend.checkpoint import directories, optimizer_state
from rl_interfaces.backend.checkpoint.directories import (
    begin_save,
    check_one_save,
    reason_of,
    taking_their_places,
)
from rl_interfaces.backend.checkpoint.optimizer_state import TrainState
from rl_interfaces.backend.runtime import failing_together

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


class Checkpointer:
    """The saves and loads of one rank. Every method is collective, unless it says otherwise.

    Args:
        checkpoint_format: What is written and read.
        timeout_s: The most seconds that one rank waits for another.
        in_background: Whether a save copies the state to the CPU, and writes while the caller goes
            on. The next call then waits for it, and raises what it failed with.
    """

    def __init__(
        self, checkpoint_format: CheckpointFormat, *, timeout_s: float, in_background: bool = False
    ) -> None:
        self._format = checkpoint_format
        self._timeout_s = timeout_s
        self._in_background = in_background
        self._group: dist.ProcessGroup | None = None
        self._pending: PendingSave | None = None

    def save(
        self, weights_path: str, optimizer_path: str | None, random_state: RankRandomState
    ) -> None:
        """Write the weights, and the training state where a path is given.

        Raises:
            ValueError: A path is taken by something else than a checkpoint.
            RuntimeError: It cannot be written, or an earlier save could not.
        """
        self.finish()
        training = None if optimizer_path is None else Path(optimizer_path).absolute()
        parts = self._format.parts(Path(weights_path).absolute(), training, random_state)
        group = self._begin([part.target for part in parts])
        if not self._in_background:
            _write_parts(parts, group)
            return
        staged = [part.staged() for part in parts]
        self._pending = PendingSave(lambda: _write_parts(staged, group), path=parts[0].target)

    def load(
        self, weights_path: str, optimizer_path: str | None, random_state: RankRandomState
    ) -> dict[str, torch.Tensor] | None:
        """Read what `save` wrote, in this layout or another; return the random state, if any.

        Raises:
            ValueError: A directory is no complete checkpoint of this model, or the two are of
                different saves.
        """
        self.finish()
        weights = Path(weights_path).absolute()
        training = None if optimizer_path is None else Path(optimizer_path).absolute()
        check_one_save([path for path in (weights, training) if path is not None])
        return self._format.load(weights, training, random_state)

    @contextmanager
    def replacing(self, path: str) -> Generator[Path, None, None]:
        """Give a directory to write into; it takes the place of `path` once the body is done.

        Raises:
            ValueError: The path is taken by something that no save has written.
            RuntimeError: It cannot be written, or an earlier save could not.
        """
        self.finish()
        target = Path(path).absolute()
        with taking_their_places([target], self._begin([target])):
            yield directories.partial_of(target)

    def finish(self) -> None:
        """Wait until the last save is on the disk. Not collective.

        Raises:
            RuntimeError: It could not be written.
            TimeoutError: It takes longer than the limit.
        """
        if (pending := self._pending) is not None:
            pending.wait(self._timeout_s)
            self._pending = None
            pending.check()

    def close(self) -> None:
        """Wait for the last save and leave the group. Not collective; may be called again.

        Raises:
            RuntimeError: The last save could not be written.
            TimeoutError: It takes longer than the limit; it goes on, until the process ends.
        """
        try:
            self.finish()
        finally:
            # A save that is late still uses the group.
            is_late = self._pending is not None
            if self._group is not None and dist.is_initialized() and not is_late:
                dist.destroy_process_group(self._group)
            self._group = None

    def _begin(self, targets: list[Path]) -> dist.ProcessGroup:
        """Make room for some directories; return the group that writes them."""
        if self._group is None:
            # Its own and on the CPU: a save in the background meets no collective of training.
            timeout = timedelta(seconds=self._timeout_s)
            group: Any = dist.new_group(backend="gloo", timeout=timeout)
            self._group = group
        assert self._group is not None
        begin_save(targets, self._group)
        return self._group


class PendingSave:
    """A save that a thread of its own writes; the process does not wait for it at its end.

    Where it is interrupted then, its files lie beside their place, see `directories`.
    """

    def __init__(self, write: Callable[[], None], *, path: Path) -> None:
        self._write = write
        self._path = path
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"save {path}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Return when it has ended.

        Raises:
            TimeoutError: It takes longer.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the checkpoint {str(self._path)!r} was not written within {timeout_s:g} s"
            )

    def check(self) -> None:
        """Raise what a save that has ended failed with.

        Raises:
            RuntimeError: It could not be written.
        """
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # `check` raises it.
            self._error = error


def _write_parts(parts: Sequence[SavePart], group: dist.ProcessGroup) -> None:
    """Write every part beside its place, then let all take their places."""
    with taking_their_places([part.target for part in parts], group):
        for part in parts:
            part.write(directories.partial_of(part.target), group)
