"""Atomic replacement of several directories at once, also if the process is killed.

A save writes each directory under a temporary name, `NAME.partial`. When all files are on the disk,
each gets a marker, `complete.json`, with the save's id and the size of every file. The marker of
the first directory is written last and commits the save; then the directories are renamed. After a
crash before the commit the partial directories are discarded; after it, the next save or load
completes the renames.

Functions that are not marked as collective run on one rank, while the others wait. Functions import
`torch.distributed.checkpoint` themselves: it takes most of a second, and drivers do not need it.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

import torch.distributed as dist

from rl_interfaces.backend.runtime import failing_together

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

MARKER = "complete.json"


Marker = TypedDict("Marker", {"save": str, "files": dict[str, int], "with": NotRequired[list[str]]})
"""A marker file: id of the save, size in bytes of every file, and in the first directory `with`,
the paths of the other directories relative to its parent."""


def partial_of(target: Path) -> Path:
    """Return the temporary name under which `target` is written."""
    return target.with_name(f"{target.name}.partial")


def begin(targets: Sequence[Path]) -> None:
    """Complete an interrupted save, then create an empty partial directory for each target.

    Raises:
        ValueError: A target exists and was not written by a save.
        OSError: A directory cannot be created.
    """
    _check_targets(targets)
    finish(targets[0])
    for target in targets:
        # An earlier save may have died before its commit.
        discard([target])
        partial_of(target).mkdir(parents=True)


def commit(targets: Sequence[Path]) -> None:
    """Mark the partial directories as complete and rename them to their targets.

    Raises:
        OSError: A marker cannot be written; no target has been replaced.
    """
    save_id = uuid.uuid4().hex
    first, *others = targets
    # The first directory is marked last: its marker commits the save as a whole.
    for target in others:
        _mark(partial_of(target), save_id)
    followers = [os.path.relpath(target, first.parent) for target in others]
    _mark(partial_of(first), save_id, others=followers)
    _publish(first)


def discard(targets: Sequence[Path]) -> None:
    """Remove the partial directories of the targets."""
    for target in targets:
        if partial_of(target).exists():
            shutil.rmtree(partial_of(target))


def finish(target: Path) -> None:
    """Complete the renames of a committed save; `target` is its first directory."""
    marker = _read_marker(partial_of(target))
    if marker is not None and "with" in marker:
        _publish(target)


def check_complete(target: Path, *, what: str) -> str:
    """Return the id of the save that wrote `target`.

    Raises:
        ValueError: It has no marker, or a file is missing or has another size.
    """
    marker = _read_marker(target)
    if marker is None:
        raise ValueError(f"{what}={str(target)!r} has no {MARKER}: it is not a complete checkpoint")
    for name, size in marker["files"].items():
        file = target / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(
                f"{what}={str(target)!r} is not a complete checkpoint: {name} {state}, "
                f"{MARKER} says {size} bytes"
            )
    return marker["save"]


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk (fsync)."""
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
            raise ValueError(f"the directories {[str(each) for each in targets]} are nested")
        if target.is_dir() and not any(target.iterdir()):
            continue
        if target.exists() and _read_marker(target) is None:
            raise ValueError(
                f"{str(target)!r} exists and no save has written it (it has no {MARKER}): "
                "it is not replaced"
            )


def _publish(first: Path) -> None:
    """Rename the directories of a committed save, the first one last. Idempotent."""
    marker = _read_marker(partial_of(first))
    assert marker is not None
    for name in marker.get("with", ()):
        target = Path(os.path.normpath(first.parent / name))
        own = _read_marker(partial_of(target))
        if own is not None and own["save"] == marker["save"]:
            _replace(target)
    # Last, as its marker lists the others: an interrupted call is repeated from it.
    _replace(first)


def _replace(target: Path) -> None:
    old = _old_of(target)
    if target.exists():
        if old.exists():
            shutil.rmtree(old)
        # Aside first: a rename cannot replace a directory that is not empty.
        target.rename(old)
    partial_of(target).rename(target)
    sync(target.parent)
    if old.exists():
        shutil.rmtree(old)


def _old_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.old")


def _mark(directory: Path, save_id: str, *, others: list[str] | None = None) -> None:
    files: dict[str, int] = {}
    for root, _, names in os.walk(directory):
        for name in names:
            path = Path(root) / name
            # Sizes, not hashes: what a crash or a full disk leaves is a file that is too short.
            sync(path)
            files[str(path.relative_to(directory))] = path.stat().st_size
        sync(Path(root))
    marker: Marker = {"save": save_id, "files": files}
    if others is not None:
        marker["with"] = others
    # All files are flushed by now: no crash can leave the marker without them.
    unfinished = directory / f"{MARKER}.unfinished"
    unfinished.write_text(json.dumps(marker, indent=1) + "\n")
    sync(unfinished)
    unfinished.rename(directory / MARKER)
    sync(directory)


def _read_marker(directory: Path) -> Marker | None:
    path = directory / MARKER
    return json.loads(path.read_text()) if path.is_file() else None


def begin_save(targets: list[Path], group: dist.ProcessGroup) -> None:
    """Create the partial directories of `targets`. Collective.

    Raises:
        ValueError: A target exists and was not written by a save.
        RuntimeError: A directory cannot be created.
    """
    with naming(targets), failing_together(group):
        if dist.get_rank(group) == 0:
            begin(targets)


@contextmanager
def taking_their_places(
    targets: list[Path], group: dist.ProcessGroup
) -> Generator[None, None, None]:
    """Commit the partial directories that the body fills; discard them if it raises. Collective."""
    from torch.distributed.checkpoint.api import CheckpointException

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
    """Add the checkpoint's path to errors of the body."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        path = str(targets[0])
        raise RuntimeError(
            f"the checkpoint {path!r} was not written: {reason_of(error)}"
        ) from error


def reason_of(error: BaseException) -> str:
    """Return the error as one line, with the failed rank if `error` names it."""
    from torch.distributed.checkpoint.api import CheckpointException

    if not isinstance(error, CheckpointException):
        return str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank} failed: {type(cause).__name__}: {cause}"


def check_one_save(paths: list[Path]) -> None:
    """Complete an interrupted save and check that the directories are of one save. Collective.

    Args:
        paths: The directory of the weights, and that of the training state if it is loaded.

    Raises:
        ValueError: A directory is not complete, or they are of different saves.
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
