"""Authenticated channels for control messages, over a Unix socket or TCP.

Before anything else both sides prove that they know the token, each by an HMAC over the other's
nonce. Every message then carries an HMAC under a key of this connection and direction with a
counter, so that none can be forged, repeated, dropped or reordered.

    server: magic, nonce                             (8 + 32 bytes)
    client: nonce, rank, HMAC(token, client)         (32 + 4 + 32 bytes)
    server: HMAC(token, server)                      (32 bytes)
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import selectors
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from rl_refit.deadline import Deadline
from rl_refit.errors import AuthenticationError, RefitError, RefitTimeoutError
from rl_refit.failures import failure_of, raise_failure
from rl_refit.messages import Failure, Message, decode, encode
from rl_refit.waiting import look_first

MAGIC = b"rlrefit1"
MAX_MESSAGE = 64 << 20
NONCE = 32
_GOODBYE_S = 1.0
_REPLY = struct.Struct(f"!{NONCE}sI32s")
_FRAME = struct.Struct("!I32s")


class ChannelClosed(ConnectionError):
    """The other side has closed the connection."""


class Channel:
    """A connection whose other side is known."""

    def __init__(
        self, sock: socket.socket, *, peer: str, send_key: bytes, receive_key: bytes
    ) -> None:
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._input = select.poll()
        self._input.register(sock, select.POLLIN)
        self._end = select.poll()
        self._end.register(sock, select.POLLRDHUP)
        self._peer = peer
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def host(self) -> str | None:
        """The address by which this machine reaches the other; None for a Unix socket."""
        return None if self._socket.family == socket.AF_UNIX else self._socket.getsockname()[0]

    def send(self, message: Message, deadline: Deadline) -> None:
        """Send a message.

        Raises:
            RefitError: The other side has failed, and said so before it went.
            ChannelClosed: It is gone.
            RefitTimeoutError: It does not read.
        """
        payload = encode(message)
        if len(payload) > MAX_MESSAGE:
            raise RefitError(f"a message of {len(payload)} bytes, at most {MAX_MESSAGE} are sent")
        mac = _seal(self._send_key, self._sent, payload)
        self._sent += 1
        try:
            self._socket.settimeout(deadline.remaining("room for a message"))
            self._socket.sendall(_FRAME.pack(len(payload), mac) + payload)
        except TimeoutError as error:
            told = f"no room for a message within {deadline.seconds:g} s"
            raise RefitTimeoutError(told) from error
        except OSError as error:
            self._hear_last_words()
            raise ChannelClosed(str(error)) from error

    def receive(self, deadline: Deadline, waited_for: str = "message") -> Message:
        """Return the next message.

        Raises:
            ChannelClosed: The other side is gone.
            RefitTimeoutError: Nothing came in time.
            AuthenticationError: The message is not the other side's next one.
        """
        look_first(self.has_input)
        length, mac = _FRAME.unpack(self._read(_FRAME.size, deadline, waited_for))
        if length > MAX_MESSAGE:
            raise AuthenticationError(f"a message of {length} bytes")
        payload = self._read(length, deadline, waited_for)
        if not hmac.compare_digest(mac, _seal(self._receive_key, self._received, payload)):
            raise AuthenticationError("a message that the other side did not send as its next one")
        self._received += 1
        return decode(payload)

    def has_input(self) -> bool:
        """Return whether a message, or the end of the connection, can be read at once."""
        return bool(self._input.poll(0))

    def has_hung_up(self) -> bool:
        """Return whether the other side has gone, though words of it may be left to read."""
        return bool(self._end.poll(0))

    def send_descriptors(self, descriptors: list[int], deadline: Deadline) -> None:
        """Pass open files to the other side; it must call `receive_descriptors` next."""
        try:
            self._socket.settimeout(deadline.remaining("room for descriptors"))
            socket.send_fds(self._socket, [b"F"], descriptors)
        except OSError as error:
            self._hear_last_words()
            raise ChannelClosed(str(error)) from error

    def receive_descriptors(self, count: int, deadline: Deadline) -> list[int]:
        """Return the open files that the other side passes."""
        try:
            self._socket.settimeout(deadline.remaining("descriptors"))
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, count, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if len(descriptors) != count:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ChannelClosed(f"{len(descriptors)} descriptors came where {count} were announced")
        return descriptors

    def leave(self, error: BaseException | None, *, rank: int | None = None) -> None:
        """Close the connection; say why, if the other side still listens."""
        if error is not None:
            with suppress(ChannelClosed, RefitError):
                self.send(failure_of(error, rank=rank), Deadline(_GOODBYE_S))
        self.close()

    def close(self) -> None:
        """Close the connection; what was sent before can still be read."""
        self._socket.close()

    def _hear_last_words(self) -> None:
        message: Message | None = None
        with suppress(ChannelClosed, RefitError):
            while not isinstance(message, Failure):
                message = self.receive(Deadline(_GOODBYE_S))
        if isinstance(message, Failure):
            raise_failure(message, origin=self._peer)

    def _read(self, size: int, deadline: Deadline, waited_for: str) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                self._socket.settimeout(deadline.remaining(waited_for))
                # No byte beyond the frame is read, as descriptors ride on the byte after it.
                chunk = self._socket.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not chunk:
                raise ChannelClosed("the connection was closed")
            data += chunk
        return bytes(data)


def connect(sock: socket.socket, *, token: bytes, rank: int, deadline: Deadline) -> Channel:
    """Return the authenticated channel of a connected socket, seen from the client.

    Raises:
        AuthenticationError: The server does not know the token, or turned this side away.
        RefitTimeoutError: The server does not answer; it does so while it is sending.
    """
    hello = _read_exactly(sock, len(MAGIC) + NONCE, deadline)
    if hello[: len(MAGIC)] != MAGIC:
        raise AuthenticationError(f"the endpoint does not speak {MAGIC.decode()}")
    own = secrets.token_bytes(NONCE)
    transcript = hello[len(MAGIC) :] + own + struct.pack("!I", rank)
    sock.sendall(_REPLY.pack(own, rank, _prove(token, b"client", transcript)))
    answer = _read_exactly(sock, 32, deadline)
    if not hmac.compare_digest(answer, _prove(token, b"server", transcript)):
        raise AuthenticationError("the endpoint does not know the token")
    return Channel(
        sock,
        peer="the sender",
        send_key=_prove(token, b"to server", transcript),
        receive_key=_prove(token, b"to client", transcript),
    )


@dataclass(slots=True)
class _Guest:
    """A connection that has yet to prove that it knows the token."""

    socket: socket.socket
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE))
    reply: bytearray = field(default_factory=bytearray)


def accept(
    listener: socket.socket,
    count: int,
    *,
    token: bytes,
    deadline: Deadline,
    present: Mapping[int, Channel] | None = None,
) -> dict[int, Channel]:
    """Return the channels of `count` receivers, by rank, once all have proven who they are.

    A connection of another user, or without the token, is closed and not waited for. Those of
    `present` count as well; they are closed if this fails.

    Raises:
        RefitTimeoutError: Fewer came in time.
    """
    channels: dict[int, Channel] = dict(present or {})
    guests: list[_Guest] = []
    listener.setblocking(False)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while len(channels) < count:
                left = deadline.remaining(f"connection: {sorted(channels)} of {count} receivers")
                for key, _ in selector.select(left):
                    if key.fileobj is listener:
                        guest = _greet(listener)
                        if guest:
                            guests.append(guest)
                            selector.register(guest.socket, selectors.EVENT_READ, guest)
                        continue
                    _hear(key.data, selector, guests, channels, token)
    except BaseException as error:
        for channel in channels.values():
            channel.leave(error)
        raise
    finally:
        for guest in guests:
            guest.socket.close()
    return channels


def _greet(listener: socket.socket) -> _Guest | None:
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    guest = _Guest(sock)
    if not _is_own_user(sock):
        sock.close()
        return None
    sock.setblocking(False)
    try:
        sock.sendall(MAGIC + guest.nonce)
    except OSError:
        sock.close()
        return None
    return guest


def _hear(
    guest: _Guest,
    selector: selectors.BaseSelector,
    guests: list[_Guest],
    channels: dict[int, Channel],
    token: bytes,
) -> None:
    """Take in what a guest says; once it is complete, let it in or close it."""
    try:
        chunk = guest.socket.recv(_REPLY.size - len(guest.reply))
    except BlockingIOError:
        return
    except OSError:
        chunk = b""
    guest.reply += chunk
    if chunk and len(guest.reply) < _REPLY.size:
        return
    selector.unregister(guest.socket)
    guests.remove(guest)
    admitted = _admit(guest, token) if chunk else None
    if admitted is None:
        guest.socket.close()
        return
    rank, channel = admitted
    if rank in channels:
        channels[rank].close()
    channels[rank] = channel


def _admit(guest: _Guest, token: bytes) -> tuple[int, Channel] | None:
    nonce, rank, proof = _REPLY.unpack(guest.reply)
    transcript = guest.nonce + nonce + struct.pack("!I", rank)
    if not hmac.compare_digest(proof, _prove(token, b"client", transcript)):
        return None
    try:
        guest.socket.sendall(_prove(token, b"server", transcript))
    except OSError:
        return None
    channel = Channel(
        guest.socket,
        peer=f"receiver {rank}",
        send_key=_prove(token, b"to client", transcript),
        receive_key=_prove(token, b"to server", transcript),
    )
    return rank, channel


def _is_own_user(sock: socket.socket) -> bool:
    if sock.family != socket.AF_UNIX:
        return True
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return user == os.geteuid()


def _read_exactly(sock: socket.socket, size: int, deadline: Deadline) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(deadline.remaining("answer of the sender's endpoint"))
        try:
            chunk = sock.recv(size - len(data))
        except TimeoutError:
            continue
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not chunk:
            raise AuthenticationError("the endpoint turned this connection away")
        data += chunk
    return data


def _prove(token: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(token, b"rl-refit/1 " + role + b":" + transcript, "sha256")


def _seal(key: bytes, counter: int, payload: bytes) -> bytes:
    return hmac.digest(key, struct.pack("!Q", counter) + payload, "sha256")
