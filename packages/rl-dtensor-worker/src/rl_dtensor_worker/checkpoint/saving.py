"""One save: what each rank writes, beside its place, and how all of it takes its place."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_interfaces.backend.checkpoint import directories
from rl_interfaces.backend.checkpoint.saves import taking_their_places
from rl_interfaces.backend.runtime.agreement import failing_together
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Part:
    """One directory of a save, and what this rank writes into it."""

    target: Path
    tensors: Tensors
    files: dict[str, Callable[[Path], Any]]
    """What writes each file, given its path."""

    def staged(self) -> Part:
        """Return the same with copies of the tensors on the CPU, which training leaves alone."""
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
        return Part(self.target, copies, self.files)


class PendingSave:
    """A save that is being written by a thread of its own, which no process waits for at its end.

    What is cut off then is beside its place, see `rl_interfaces.backend.checkpoint.directories`.
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


def write_parts(parts: list[Part], group: dist.ProcessGroup) -> None:
    """Write every part beside its place, then let all take their places."""
    with taking_their_places([part.target for part in parts], group):
        for part in parts:
            _save_tensors(part.tensors, directories.partial_of(part.target), group)
            with failing_together(group):
                for name, write in part.files.items():
                    write(directories.partial_of(part.target) / name)


def _save_tensors(tensors: Tensors, directory: Path, group: dist.ProcessGroup) -> None:
    if tensors:
        writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
        save_sharded(tensors, storage_writer=writer, process_group=group)
