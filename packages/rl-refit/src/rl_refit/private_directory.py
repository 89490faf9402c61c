"""Temporary directories that are removed also after their owner was killed.

The owner holds a lock on a file in there as long as it lives, so the next one to look sees that
nobody is at home, and removes what was left behind. The lock goes last, so that a removal that is
cut short is taken up again.
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

from rl_refit.closing import Closing

_LOCK, _EARLY_LOCK = "lock", "lock-early"

_BIRTH_S = 300.0
"""For how long a directory without a lock is taken for one that is just being made or removed."""


class PrivateDirectory(Closing):
    """A new directory that this user alone can enter (0700).

    Making one removes those that dead owners have left under the same prefix.

    Args:
        prefix: How its name begins.
        most_characters: Of its path: where the usual place leads to a longer one it is in `/tmp`.
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
        """Remove it; a forked process leaves it to its owner. May be called again."""
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

    One without a lock, five minutes old, is of an owner that died while making or removing it. It
    is removed if nothing else is in it.
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
    # Locked under another name first: a lock that is there and free means that its owner is dead.
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
    """Remove it as far as that can be done; the lock stays as long as anything else does."""
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
