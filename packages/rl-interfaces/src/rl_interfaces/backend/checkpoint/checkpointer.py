"""The saves and loads of one rank: complete and in their places, or not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl_interfaces.backend.checkpoint import directories
from rl_interfaces.backend.checkpoint.format import CheckpointFormat, RankRandomState, SavePart
from rl_interfaces.backend.checkpoint.saves import begin_save, check_one_save, taking_their_places


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
