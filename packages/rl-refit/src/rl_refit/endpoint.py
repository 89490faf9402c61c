"""Where a sender listens: a Unix socket in a private directory, or a TCP port.

A process that is killed leaves its directory behind. It holds a lock on a file in there as long as
it lives, so the next one to look, a receiver whose connection broke or another sender that starts,
sees that nobody is at home, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
from pathlib import Path

from rl_refit.deadline import Deadline
from rl_refit.errors import RefitError

PREFIX = "rl-refit-"
_LONGEST_PATH = 100
_BACKLOG = 128


class Endpoint:
    """A listening socket and, where all are on one machine, a private directory."""

    def __init__(self, *, host: str | None) -> None:
        """Listen on a Unix socket, or on a free TCP port of `host` if one is given."""
        remove_abandoned()
        self.host = host
        self._owner = os.getpid()
        self.directory: Path | None = None
        if host is None:
            self.directory = _private_directory()
            self._lock = _hold(self.directory / "lock")
            self.listener = _listen_unix(self.directory / "control")
            self.address = f"unix:{self.directory / 'control'}"
        else:
            self.listener = _listen_tcp(host)
            self.address = f"tcp:{host}:{self.listener.getsockname()[1]}"

    def close(self) -> None:
        """Stop listening and remove the directory."""
        self.listener.close()
        if self.directory is not None and os.getpid() == self._owner:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self.directory = None


def dial(address: str, deadline: Deadline) -> socket.socket:
    """Return a socket connected to an `Endpoint.address`.

    Raises:
        RefitError: Nobody listens there.
    """
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    sock = socket.socket(socket.AF_UNIX) if kind == "unix" else None
    try:
        if sock is None:
            return socket.create_connection((host, int(port)), deadline.remaining("connection"))
        sock.settimeout(deadline.remaining("connection"))
        sock.connect(rest)
        return sock
    except OSError as error:
        if sock is not None:
            sock.close()
        forget(address)
        raise RefitError(f"no sender listens on {address}: {error}") from error


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine by which `host` reaches it. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def forget(address: str, *, within_s: float = 0.0) -> None:
    """Remove what a sender left behind, if it is dead or dies within that time."""
    kind, _, path = address.partition(":")
    if kind != "unix":
        return
    give_up = time.monotonic() + within_s
    _remove_if_abandoned(Path(path).parent)
    while Path(path).exists() and time.monotonic() < give_up:
        time.sleep(0.005)
        _remove_if_abandoned(Path(path).parent)


def remove_abandoned() -> None:
    """Remove the directories that dead senders of this user left behind."""
    for root in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for directory in root.glob(f"{PREFIX}*"):
            _remove_if_abandoned(directory)


def _remove_if_abandoned(directory: Path) -> None:
    with contextlib.suppress(OSError):
        if not directory.name.startswith(PREFIX) or directory.lstat().st_uid != os.geteuid():
            return
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)


def _private_directory() -> Path:
    root = tempfile.gettempdir()
    if len(root) > _LONGEST_PATH - len(PREFIX) - 24:
        root = "/tmp"
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))


def _hold(path: Path) -> int:
    # Locked under another name first: a lock that is there and free means that its owner is dead.
    early = path.with_name(secrets.token_hex(4))
    descriptor = os.open(early, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    early.rename(path)
    return descriptor


def _listen_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    return listener


def _listen_tcp(host: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, 0))
    listener.listen(_BACKLOG)
    return listener
