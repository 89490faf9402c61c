"""Saves and loads of one rank, and the format of what they write.

`TensorFormat` is the format of every backend whose optimizer is torch's: weights and optimizer
tensors are safetensors shards in the layout of `torch.distributed.checkpoint`, so that any layout
of ranks reads them; `state.pt` (groups, counters, schedule, loss scale) and `random_N.pt` (the
random state of data-parallel rank N) hold plain values and are read with `weights_only=True`.

Functions import `torch.distributed.checkpoint` themselves: it takes most of a second, and drivers,
which validate a config for the worker, do not need it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

from rl_interfaces.backend.checkpoint import directories, optimizer_state
from rl_interfaces.backend.checkpoint.directories import (
    begin_save,
    check_one_save,
    reason_of,
    taking_their_places,
)
from rl_interfaces.backend.checkpoint.optimizer_state import PlainState, TrainState
from rl_interfaces.backend.runtime import failing_together, on_device

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
FileWriters = dict[str, Callable[[Path], object]]
"""By file name, a function that writes the file to a path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRandomState:
    """The random state of one data-parallel rank."""

    data_parallel_rank: int
    is_written_here: bool
    """True on exactly one rank of each data-parallel rank."""
    state: Tensors

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"random_{self.data_parallel_rank}.pt"


class SavePart(Protocol):
    """One directory of a save, with this rank's share of it."""

    @property
    def target(self) -> Path:
        """The final path of the directory."""
        ...

    def staged(self) -> SavePart:
        """Return the same with copies of the tensors, which training does not change."""
        ...

    def write(self, directory: Path, group: dist.ProcessGroup) -> None:
        """Write into `directory`. Collective over `group`, a gloo group."""
        ...


class CheckpointFormat(Protocol):
    """How one rank's state is saved and loaded. Every method is collective."""

    def parts(
        self, weights: Path, training: Path | None, random_state: RankRandomState
    ) -> Sequence[SavePart]:
        """Return the directories to write: weights, then training state if a path is given."""
        ...

    def load(
        self, weights: Path, training: Path | None, random_state: RankRandomState
    ) -> Tensors | None:
        """Load both into the engine; return this rank's random state, None if the save lacks it.

        Raises:
            ValueError: A directory does not match the model or optimizer; nothing was loaded.
        """
        ...


@dataclass(slots=True)
class TensorPart:
    """A `SavePart` of tensors and DTensors, as safetensors shards, and of small files."""

    target: Path
    tensors: Tensors
    files: FileWriters

    def staged(self) -> TensorPart:
        """See `SavePart.staged`; the copies are on the CPU."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        on_cuda = any(tensor.is_cuda for tensor in self.tensors.values())
        options = StagingOptions(
            use_pinned_memory=on_cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_cuda,
        )
        stager = DefaultStager(options)
        copies = stager.stage(self.tensors)
        stager.close()
        return TensorPart(self.target, cast("Tensors", copies), self.files)

    def write(self, directory: Path, group: dist.ProcessGroup) -> None:
        """See `SavePart.write`."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

        if self.tensors:
            writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
            save_sharded(self.tensors, storage_writer=writer, process_group=group)
        with failing_together(group):
            for name, write in self.files.items():
                write(directory / name)


@dataclass(kw_only=True, slots=True)
class TensorFormat:
    """The `CheckpointFormat` of an engine with a torch optimizer."""

    model: nn.Module
    training: TrainState | None
    weights: Callable[[], Tensors]
    """Returns the tensors to save as weights; a load fills them in place."""
    files: Callable[[], FileWriters] = field(default=dict)
    """Returns writers of further files in the weights' directory; called on rank 0 only."""
    check: Callable[[Path], None] | None = None
    """Raises `ValueError` if the directory's files are of another model."""

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
                # Plain values are the same on every rank.
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
        saved: tuple[PlainState, Tensors] | None = None
        # Check on all ranks before any of them overwrites its state.
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
    """Raise unless the directory has exactly these tensor names and shapes.

    Raises:
        ValueError: The message names the first tensors that differ.
    """
    stored = _stored_tensors(path)
    missing = sorted(tensors.keys() - stored.keys())
    if missing:
        raise ValueError(f"{what}={str(path)!r} lacks {len(missing)} tensors, first {missing[:3]}")
    beyond = sorted(stored.keys() - tensors.keys())
    if beyond:
        raise ValueError(
            f"{what}={str(path)!r} is of another model: it has {len(beyond)} tensors that this one "
            f"lacks, first {beyond[:3]}"
        )
    for name, tensor in tensors.items():
        shape = tuple(stored[name].size)
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"{what}={str(path)!r}: {name} has shape {shape}, "
                f"the model's has {tuple(tensor.shape)}"
            )


def _load_tensors(tensors: Tensors, path: Path, *, what: str) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

    try:
        with torch.no_grad():
            load_sharded(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
    except CheckpointException as error:
        raise RuntimeError(f"{what}={str(path)!r} was not loaded: {reason_of(error)}") from error


def _stored_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    stored = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return cast("dict[str, TensorStorageMetadata]", stored)  # safetensors holds nothing else


def _read_training_state(
    model: nn.Module, training: TrainState, path: Path
) -> tuple[PlainState, Tensors]:
    """Return the directory's plain values, and the tensors to load the others into."""
    others = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
    stored = _stored_tensors(path)
    try:
        optimizer_state.check_fits(model, training, others, stored)
        return others, optimizer_state.tensors_to_fill(model, training, stored)
    except ValueError as error:
        raise ValueError(f"optimizer_path={str(path)!r}: {error}") from error


def _load_random(path: Path) -> Tensors | None:
    if not path.is_file():
        logger.warning("%s does not exist: the random state of this rank is not restored", path)
        return None
    return torch.load(path, weights_only=True)


class Checkpointer:
    """The saves and loads of one rank. Every method is collective, unless it says otherwise.

    Args:
        checkpoint_format: The format of the files.
        timeout_s: Limit of each wait for another rank, in seconds.
        device: Of this rank, on which its threads work.
        in_background: A save copies the state to the CPU and returns; a thread writes it. The next
            call waits for the thread and raises its error.
    """

    def __init__(
        self,
        checkpoint_format: CheckpointFormat,
        *,
        timeout_s: float,
        device: torch.device,
        in_background: bool = False,
    ) -> None:
        self._format = checkpoint_format
        self._device = device
        self._timeout_s = timeout_s
        self._in_background = in_background
        self._group: dist.ProcessGroup | None = None
        self._pending: PendingSave | None = None

    def save(
        self, weights_path: str, optimizer_path: str | None, random_state: RankRandomState
    ) -> None:
        """Write the weights, and the training state if a path is given.

        Raises:
            ValueError: A path exists and was not written by a save.
            RuntimeError: This save or the previous one could not be written.
        """
        # One save at a time: the group and perhaps the paths are those of the last one.
        self.finish()
        training = None if optimizer_path is None else Path(optimizer_path).absolute()
        parts = self._format.parts(Path(weights_path).absolute(), training, random_state)
        group = self._begin([part.target for part in parts])
        if not self._in_background:
            _write_parts(parts, group)
            return
        # Copies, as the next optimizer step changes the tensors in place.
        staged = [part.staged() for part in parts]
        self._pending = PendingSave(
            lambda: _write_parts(staged, group), path=parts[0].target, device=self._device
        )

    def load(
        self, weights_path: str, optimizer_path: str | None, random_state: RankRandomState
    ) -> dict[str, torch.Tensor] | None:
        """Load what `save` wrote under any parallel layout; return the random state, if any.

        Raises:
            ValueError: A directory is not a complete checkpoint of this model, or the two are of
                different saves.
        """
        # The save that is still being written may be the one to load.
        self.finish()
        weights = Path(weights_path).absolute()
        training = None if optimizer_path is None else Path(optimizer_path).absolute()
        check_one_save([path for path in (weights, training) if path is not None])
        return self._format.load(weights, training, random_state)

    @contextmanager
    def replacing(self, path: str) -> Generator[Path, None, None]:
        """Run the body with a temporary directory, which then replaces `path` atomically.

        Raises:
            ValueError: The path exists and was not written by a save.
            RuntimeError: It could not be written, or the previous save could not.
        """
        self.finish()
        target = Path(path).absolute()
        with taking_their_places([target], self._begin([target])):
            yield directories.partial_of(target)

    def finish(self) -> None:
        """Wait until the last save is on the disk. Not collective.

        Raises:
            RuntimeError: It could not be written.
            TimeoutError: It took longer than the limit.
        """
        if (pending := self._pending) is not None:
            pending.wait(self._timeout_s)
            self._pending = None
            pending.check()

    def close(self) -> None:
        """Wait for the last save and destroy the group. Not collective. Idempotent.

        Raises:
            RuntimeError: The last save could not be written.
            TimeoutError: It took longer than the limit; its thread continues.
        """
        try:
            self.finish()
        finally:
            # A save that timed out still uses the group.
            is_late = self._pending is not None
            if self._group is not None and dist.is_initialized() and not is_late:
                dist.destroy_process_group(self._group)
            self._group = None

    def _begin(self, targets: list[Path]) -> dist.ProcessGroup:
        """Create the partial directories; return the group that writes them."""
        if self._group is None:
            # A separate gloo group: collectives of a background save must not interleave with
            # those of training.
            timeout = timedelta(seconds=self._timeout_s)
            self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))
        begin_save(targets, self._group)
        return self._group


class PendingSave:
    """A save that is written by a daemon thread.

    If the process exits first, the partial directories are discarded, see `directories`.

    Args:
        write: Writes it.
        path: Its directory, for messages.
        device: The thread's.
    """

    def __init__(self, write: Callable[[], None], *, path: Path, device: torch.device) -> None:
        self._write = write
        self._path = path
        self._device = device
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"save {path}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait for the thread.

        Raises:
            TimeoutError: It took longer.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the checkpoint {str(self._path)!r} was not written within {timeout_s:g} s"
            )

    def check(self) -> None:
        """Raise the error of the thread, if any.

        Raises:
            RuntimeError: The save could not be written.
        """
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with on_device(self._device):
                self._write()
        except Exception as error:  # `check` raises it.
            self._error = error


def _write_parts(parts: Sequence[SavePart], group: dist.ProcessGroup) -> None:
    """Write every partial directory, then commit all of them."""
    with taking_their_places([part.target for part in parts], group):
        for part in parts:
            part.write(directories.partial_of(part.target), group)
