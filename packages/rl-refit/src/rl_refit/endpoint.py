"""Where a sender listens: a Unix socket in a private directory, or a TCP port.

What a process that is killed leaves behind is removed by the next one to look: a receiver whose
connection broke, or another sender that starts.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from rl_refit.deadline import Deadline
from rl_refit.errors import RefitError
from rl_refit.private_directory import PrivateDirectory, remove_abandoned, remove_if_abandoned

PREFIX = "rl-refit-"
_MOST_CHARACTERS = 90
"""Of the directory: the kernel takes 107 for the path of a socket."""
_BACKLOG = 128


class Endpoint:
    """A listening socket and, where all are on one machine, a private directory."""

    def __init__(self, *, host: str | None) -> None:
        """Listen on a Unix socket, or on a free TCP port of `host` if one is given."""
        self.host = host
        self.directory: Path | None = None
        self._private: PrivateDirectory | None = None
        self.listener = socket.socket(socket.AF_UNIX if host is None else socket.AF_INET)
        try:
            if host is None:
                self._private = PrivateDirectory(PREFIX, most_characters=_MOST_CHARACTERS)
                self.directory = self._private.path
                _listen_unix(self.listener, self.directory / "control")
                self.address = f"unix:{self.directory / 'control'}"
            else:
                remove_abandoned(PREFIX)
                _listen_tcp(self.listener, host)
                self.address = f"tcp:{host}:{self.listener.getsockname()[1]}"
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening and remove the directory."""
        self.listener.close()
        if self._private is not None:
            self._private.close()


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
    directory = Path(path).parent
    if not directory.name.startswith(PREFIX):
        return
    give_up = time.monotonic() + within_s
    remove_if_abandoned(directory)
    while Path(path).exists() and time.monotonic() < give_up:
        time.sleep(0.005)
        remove_if_abandoned(directory)


def _listen_unix(listener: socket.socket, path: Path) -> None:
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(_BACKLOG)


def _listen_tcp(listener: socket.socket, host: str) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, 0))
    listener.listen(_BACKLOG)
