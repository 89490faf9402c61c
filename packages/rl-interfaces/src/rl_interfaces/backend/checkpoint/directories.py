"""Directories that take their places whole, several of them at once, whatever kills the process.

A save writes each directory beside its place, as `NAME.partial`. When all files are on the disk,
each gets a marker, `complete.json`, with the save's id and the size of every file; that of the
first directory is written last, and with it the save counts. Only then are they renamed into place.
What was killed before is thrown away; what was killed after is finished by the next save or load.

Functions that are not marked as collective run on one rank, while the others wait.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rl_interfaces.backend.runtime import failing_together

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

MARKER = "complete.json"


def partial_of(target: Path) -> Path:
    """Return where `target` is written before it takes its place."""
    return target.with_name(f"{target.name}.partial")


def begin(targets: Sequence[Path]) -> None:
    """Make an empty directory beside each target, once an earlier save has been finished.

    Raises:
        ValueError: A target is no directory that a save has written, and is not replaced.
        OSError: A directory cannot be made.
    """
    _check_targets(targets)
    finish(targets[0])
    for target in targets:
        discard([target])
        partial_of(target).mkdir(parents=True)


def commit(targets: Sequence[Path]) -> None:
    """Mark what stands beside the targets as complete, and let it take their places.

    Raises:
        OSError: It cannot be written; then nothing has taken its place.
    """
    save_id = uuid.uuid4().hex
    first, *others = targets
    for target in others:
        _mark(partial_of(target), {"save": save_id})
    followers = [os.path.relpath(target, first.parent) for target in others]
    _mark(partial_of(first), {"save": save_id, "with": followers})
    _publish(first)


def discard(targets: Sequence[Path]) -> None:
    """Remove what stands beside the targets."""
    for target in targets:
        if partial_of(target).exists():
            shutil.rmtree(partial_of(target))


def finish(target: Path) -> None:
    """Let a save that was complete when its process died take its place; `target` is its first."""
    marker = _read_marker(partial_of(target))
    if marker is not None and "with" in marker:
        _publish(target)


def check_complete(target: Path, *, what: str) -> str:
    """Return the id of the save that wrote `target`.

    Raises:
        ValueError: It is not complete: it has no marker, or lacks files of it.
    """
    marker = _read_marker(target)
    if marker is None:
        raise ValueError(f"{what}={str(target)!r} has no {MARKER}: it is no complete checkpoint")
    for name, size in marker["files"].items():
        file = target / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(
                f"{what}={str(target)!r} is no complete checkpoint: {name} {state}, "
                f"{MARKER} says {size} bytes"
            )
    return marker["save"]


def sync(path: Path) -> None:
    """Bring a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_targets(targets: Sequence[Path]) -> None:
    for target in targets:
        if any(
            target == other or target in other.parents for other in targets if other is not target
        ):
            raise ValueError(f"the directories {[str(each) for each in targets]} hold each other")
        if target.is_dir() and not any(target.iterdir()):
            continue
        if target.exists() and _read_marker(target) is None:
            raise ValueError(
                f"{str(target)!r} exists and no save has written it (it has no {MARKER}): "
                "it is not replaced"
            )


def _publish(first: Path) -> None:
    """Rename a complete save into place, the first directory last. Once more changes nothing."""
    marker = _read_marker(partial_of(first))
    assert marker is not None
    for name in marker["with"]:
        target = Path(os.path.normpath(first.parent / name))
        own = _read_marker(partial_of(target))
        if own is not None and own["save"] == marker["save"]:
            _replace(target)
    _replace(first)


def _replace(target: Path) -> None:
    old = _old_of(target)
    if target.exists():
        if old.exists():
            shutil.rmtree(old)
        target.rename(old)
    partial_of(target).rename(target)
    sync(target.parent)
    if old.exists():
        shutil.rmtree(old)


def _old_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.old")


def _mark(directory: Path, content: dict[str, Any]) -> None:
    files: dict[str, int] = {}
    for root, _, names in os.walk(directory):
        for name in names:
            path = Path(root) / name
            sync(path)
            files[str(path.relative_to(directory))] = path.stat().st_size
        sync(Path(root))
    unfinished = directory / f"{MARKER}.unfinished"
    unfinished.write_text(json.dumps({**content, "files": files}, indent=1) + "\n")
    sync(unfinished)
    unfinished.rename(directory / MARKER)
    sync(directory)


def _read_marker(directory: Path) -> dict[str, Any] | None:
    path = directory / MARKER
    return json.loads(path.read_text()) if path.is_file() else None


def begin_save(targets: list[Path], group: dist.ProcessGroup) -> None:
    """Make room beside some directories. Collective.

    Raises:
        ValueError: One is something that no save has written.
        RuntimeError: It cannot be made.
    """
    with naming(targets), failing_together(group):
        if dist.get_rank(group) == 0:
            begin(targets)


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
                    commit(targets)
        except (Exception, CheckpointException):
            if is_first:
                discard(targets)
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
            finish(paths[0])
    with failing_together():
        saves = {
            name: check_complete(path, what=name) for name, path in zip(names, paths, strict=False)
        }
        if len(set(saves.values())) > 1:
            raise ValueError(
                f"weights_path={str(paths[0])!r} and optimizer_path={str(paths[1])!r} are of "
                f"different saves: {list(saves.values())}"
            )
