"""Temporary directories that are removed even if their owner was killed.

The owner holds an `flock` on a file in the directory for its lifetime. The kernel releases the lock
of a dead process: any process that can take it removes the directory. The lock file is removed
last, so that an interrupted removal can be resumed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from rl_refit.protocol.waiting import Closing

_LOCK, _EARLY_LOCK = "lock", "lock-early"

_BIRTH_S = 300.0
"""A younger directory without a lock file may be under construction or removal."""


class PrivateDirectory(Closing):
    """A new directory that only this user can enter (0700).

    Its construction also removes the directories of dead owners under the same prefix.

    Args:
        prefix: Of its name.
        most_characters: Limit of its path: it is created in `/tmp` if `tempfile.gettempdir()` would
            make it longer.
    """

    path: Path
    """Where it is."""

    def __init__(self, prefix: str, *, most_characters: int | None = None) -> None:
        remove_abandoned(prefix)
        root = tempfile.gettempdir()
        if most_characters is not None and len(root) > most_characters - len(prefix) - 9:
            root = "/tmp"
        self._owner = os.getpid()
        self._lock: int | None = None
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            self._lock = _hold(self.path)
        except BaseException:
            _remove(self.path)
            raise

    def close(self) -> None:
        """Remove it, unless this is a fork of the owner. May be called again."""
        # A fork inherits this object and the lock, and must not remove its parent's directory.
        if self._lock is not None and os.getpid() == self._owner:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def remove_abandoned(prefix: str) -> None:
    """Remove this user's directories of that prefix whose owners are dead."""
    for root in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for directory in root.glob(f"{prefix}*"):
            remove_if_abandoned(directory)


def remove_if_abandoned(directory: Path) -> None:
    """Remove a `PrivateDirectory` whose owner is dead; leave any other as it is.

    One without a lock file that is five minutes old has an owner that died while creating or
    removing it: it is removed if it is otherwise empty.
    """
    with contextlib.suppress(OSError):
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return
        try:
            # Never through a link: other users may create entries in /tmp.
            descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if time.time() - found.st_mtime > _BIRTH_S:
                _remove_emptied(directory, lock=_EARLY_LOCK)
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(directory)
        finally:
            os.close(descriptor)


def _hold(directory: Path) -> int:
    # Locked before it gets its name: a free lock file of that name would mean a dead owner.
    early = directory / _EARLY_LOCK
    descriptor = os.open(early, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        early.rename(directory / _LOCK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove(directory: Path) -> None:
    """Remove the content as far as possible; the lock file only if nothing else is left."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.name == _LOCK:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        _remove_emptied(directory, lock=_LOCK)


def _remove_emptied(directory: Path, *, lock: str) -> None:
    if all(path.name == lock for path in directory.iterdir()):
        (directory / lock).unlink(missing_ok=True)
        directory.rmdir()
