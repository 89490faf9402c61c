"""Temporary directories that are removed even if their owner was killed.

The owner holds an `flock` on a file in the directory as long as it lives: a file that can be locked
has a dead owner, and whoever finds it removes the directory. The lock file is removed last, so that
an interrupted removal can be resumed.
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
"""Until it is this old, a directory without a lock may be one that is being made or removed."""


class PrivateDirectory(Closing):
    """A new directory that this user alone can enter (0700).

    Making one also removes those that dead owners have left under the same prefix.

    Args:
        prefix: Of its name.
        most_characters: Limit of its path; where `tempfile.gettempdir()` leads to a longer one, it
            is made in `/tmp`.
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
        if self._lock is not None and os.getpid() == self._owner:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def remove_abandoned(prefix: str) -> None:
    """Remove the directories of that prefix that dead owners of this user left behind."""
    for root in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for directory in root.glob(f"{prefix}*"):
            remove_if_abandoned(directory)


def remove_if_abandoned(directory: Path) -> None:
    """Remove a `PrivateDirectory` whose owner is dead; leave any other as it is.

    One without a lock that is five minutes old has an owner that died while making or removing it:
    it is removed if it is otherwise empty.
    """
    with contextlib.suppress(OSError):
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return
        try:
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
    # Locked under another name first: a lock file that is there and free means a dead owner.
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
    """Remove what can be removed; the lock file stays as long as anything else does."""
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
