"""A TCP port that is promised to one listener before it listens."""

from __future__ import annotations

import socket
from typing import Self


class ReservedPort:
    """A TCP port of this machine that the system gives to nobody else while this object is open.

    A port that was free a moment ago can be another process's when the listener comes. Here a
    socket stays bound to it, and never listens. Who knows the number can listen on it with
    `SO_REUSEADDR` set, as torch's `TCPStore` has it.

    Args:
        host: The address to bind, by default every one of the machine.
    """

    number: int
    """The port."""

    def __init__(self, host: str = "") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back; one who listens on it keeps it. Calling it twice is fine."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
