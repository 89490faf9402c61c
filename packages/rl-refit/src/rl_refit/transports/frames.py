"""The frames of a chain's connections, and the handshake that lets its members in."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from contextlib import suppress

Address = tuple[str, int]

KEY_BYTES = 32

_HANDSHAKE_S = 5.0
_MOST_REQUEST_BYTES = 4096
_MOST_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct("!I")


def connect(address: Address, key: bytes, limit_s: float) -> socket.socket:
    """Return a connection to a server of the chain that has let this side in."""
    sock = socket.create_connection(address, limit_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = receive_exactly(sock, KEY_BYTES)
        sock.sendall(hmac.digest(key, nonce, "sha256"))
    except BaseException:
        sock.close()
        raise
    return sock


def admit(sock: socket.socket, key: bytes) -> None:
    """Let a client in, or raise `ConnectionError`."""
    sock.settimeout(_HANDSHAKE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    nonce = secrets.token_bytes(KEY_BYTES)
    sock.sendall(nonce)
    proof = receive_exactly(sock, KEY_BYTES)
    if not hmac.compare_digest(proof, hmac.digest(key, nonce, "sha256")):
        raise ConnectionError("the client does not know the key")
    sock.settimeout(None)


def send_frame(sock: socket.socket, data: bytes | memoryview) -> None:
    """Send bytes with their length before them, in one packet if they fit."""
    header = _LENGTH.pack(len(data))
    sent = sock.sendmsg([header, data])
    if sent < len(header):
        sock.sendall(header[sent:])
        sent = len(header)
    sock.sendall(memoryview(data)[sent - len(header) :])


def receive_request(sock: socket.socket) -> bytes | None:
    """Return the frame of the next request, None at the end of the connection.

    Raises:
        ConnectionError: It is too large, or is cut off.
    """
    first = sock.recv(1)
    if not first:
        return None
    (length,) = _LENGTH.unpack(first + receive_exactly(sock, _LENGTH.size - 1))
    if length > _MOST_REQUEST_BYTES:
        raise ConnectionError(f"a request of {length} bytes")
    return receive_exactly(sock, length)


def receive_length(sock: socket.socket) -> int:
    """Return the length of the next frame, whose bytes follow."""
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
    if length > _MOST_FRAME_BYTES:
        raise ConnectionError(f"a frame of {length} bytes")
    return length


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Return so many bytes, or raise `ConnectionError` if the connection ends before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        num = sock.recv_into(view)
        if not num:
            raise ConnectionError("the connection has ended")
        view = view[num:]
    return bytes(data)


def shut(sock: socket.socket) -> None:
    """End the waits of other threads on a socket."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
