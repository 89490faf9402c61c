"""A save of all ranks together: whole and in its place, or not there, and named in its errors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rl_interfaces.backend.checkpoint import directories
from rl_interfaces.backend.runtime.agreement import failing_together

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


def begin_save(targets: list[Path], group: dist.ProcessGroup) -> None:
    """Make room beside some directories. Collective.

    Raises:
        ValueError: One is something that no save has written.
        RuntimeError: It cannot be made.
    """
    with naming(targets), failing_together(group):
        if dist.get_rank(group) == 0:
            directories.begin(targets)


@contextmanager
def taking_their_places(
    targets: list[Path], group: dist.ProcessGroup
) -> Generator[None, None, None]:
    """Let what the body writes beside `targets` take their places, or throw it away. Collective."""
    is_first = dist.get_rank(group) == 0
    with naming(targets):
        try:
            yield
            with failing_together(group):
                if is_first:
                    directories.commit(targets)
        except (Exception, CheckpointException):
            if is_first:
                directories.discard(targets)
            raise


@contextmanager
def naming(targets: list[Path]) -> Generator[None, None, None]:
    """Name the checkpoint in what goes wrong, on every rank alike."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        path = str(targets[0])
        raise RuntimeError(
            f"the checkpoint {path!r} was not written: {reason_of(error)}"
        ) from error


def reason_of(error: BaseException) -> str:
    """Return in a line what went wrong, and on which rank where `error` tells it."""
    if not isinstance(error, CheckpointException):
        return str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank} failed: {type(cause).__name__}: {cause}"


def check_one_save(paths: list[Path]) -> None:
    """Finish a save that was interrupted, and check that its directories are of one. Collective.

    Args:
        paths: That of the weights, and that of the training state where it is loaded.

    Raises:
        ValueError: One is not complete, or they are of different saves.
    """
    names = ("weights_path", "optimizer_path")
    with failing_together():
        if dist.get_rank() == 0:
            directories.finish(paths[0])
    with failing_together():
        saves = {
            name: directories.check_complete(path, what=name)
            for name, path in zip(names, paths, strict=False)
        }
        if len(set(saves.values())) > 1:
            raise ValueError(
                f"weights_path={str(paths[0])!r} and optimizer_path={str(paths[1])!r} are of "
                f"different saves: {list(saves.values())}"
            )
