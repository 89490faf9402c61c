"""Temporary directories that are removed also after their owner was killed.

The owner holds a lock on a file in there as long as it lives, so the next one to look sees that
nobody is at home, and removes what was left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from rl_refit.closing import Closing


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
        self._lock = _hold(self.path / "lock")

    def close(self) -> None:
        """Remove it; a forked process leaves it to its owner. May be called again."""
        if self._lock is not None and os.getpid() == self._owner:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_abandoned(prefix: str) -> None:
    """Remove the directories of that prefix that dead owners of this user left behind."""
    for root in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for directory in root.glob(f"{prefix}*"):
            remove_if_abandoned(directory)


def remove_if_abandoned(directory: Path) -> None:
    """Remove a `PrivateDirectory` whose owner is dead; leave any other as it is."""
    with contextlib.suppress(OSError):
        if directory.lstat().st_uid != os.geteuid():
            return
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)


def _hold(path: Path) -> int:
    # Locked under another name first: a lock that is there and free means that its owner is dead.
    early = path.with_name(secrets.token_hex(4))
    descriptor = os.open(early, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    early.rename(path)
    return descriptor
