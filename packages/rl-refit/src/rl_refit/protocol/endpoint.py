"""The address of a sender, and the handshake that authenticates both sides of a connection.

Within one machine a sender listens on a Unix socket in a private directory, otherwise on a TCP
port. Files of a killed sender are removed by the next process that finds them: a receiver whose
connection broke, or another sender that starts.

The handshake comes before any message; every HMAC covers both nonces and the rank:

    server  magic, nonce                             8 + 32 bytes
    client  nonce, rank, HMAC(token, "client")       32 + 4 + 32 bytes
    server  HMAC(token, "server")                    32 bytes

The keys of the channel are two more such HMACs, one for each direction.
"""

from __future__ import annotations

import errno
import hmac
import math
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_refit.errors import AuthenticationError, RefitError
from rl_refit.private_directory import PrivateDirectory, remove_abandoned, remove_if_abandoned
from rl_refit.protocol.channel import Channel, read_exactly
from rl_refit.protocol.waiting import Closing, Deadline

PREFIX = "rl-refit-"
MAGIC = b"rlrefit3"
"""Names the version of handshake, frames and messages: incompatible releases refuse each other."""
NONCE_BYTES = 32
_MAC_BYTES = 32
_MOST_CHARACTERS = 90
"""Limit of the directory's path: the kernel limits the path of a socket to 107 characters."""
_BACKLOG = 128
MAX_PENDING = 128
"""Connections that may wait for authentication at a time."""
_REPLY_WITHIN_S = 0.25
"""A connection that has not authenticated within this time may be closed for another."""
_NO_ROOM_PAUSE_S = 0.01
"""Between attempts to accept, or to connect to a full backlog, while there is no room."""
_REPLY = struct.Struct(f"!{NONCE_BYTES}sI{_MAC_BYTES}s")


@dataclass(slots=True)
class _PendingConnection:
    """A connection that is not authenticated yet."""

    socket: socket.socket
    since: float = field(default_factory=time.monotonic)
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    reply: bytearray = field(default_factory=bytearray)


class _PendingConnections(Closing):
    """The connections that are not authenticated yet, oldest first, and a listener for more.

    Their number is bounded, so that strangers who connect and say nothing can neither exhaust this
    process's descriptors nor keep a receiver out: the oldest is closed for the newest, once it had
    time to reply. Until then the newest waits in the listener's backlog.

    Args:
        listener: Of an `Endpoint`.
    """

    def __init__(self, listener: socket.socket) -> None:
        # A connection may be reset between `select` and `accept`, which must not block then.
        listener.setblocking(False)
        self._listener = listener
        self._pending: dict[socket.socket, _PendingConnection] = {}
        # Made with the endpoint, as there may be no descriptor left for it later.
        self._selector = selectors.EpollSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def wait(self, seconds: float) -> list[_PendingConnection]:
        """Wait for new connections and replies; return those whose reply is complete, to own."""
        complete: list[_PendingConnection] = []
        has_room = True
        events = self._selector.select(seconds)
        # Replies first: one that has arrived must not be closed for a new connection.
        for key, _ in events:
            if key.fileobj is not self._listener and self._read_reply(key.data):
                complete.append(key.data)
        if any(key.fileobj is self._listener for key, _ in events):
            has_room = self._accept_one()
        if not has_room and not complete:
            # The listener stays readable: without a pause, the caller's loop would spin.
            time.sleep(_NO_ROOM_PAUSE_S)
        return complete

    @property
    def num_pending(self) -> int:
        """How many are not authenticated."""
        return len(self._pending)

    def fileno(self) -> int:
        """Return a descriptor that is readable if `wait` has something to do."""
        return self._selector.fileno()

    def close_pending(self) -> None:
        """Close all pending connections."""
        for sock in list(self._pending):
            self._remove(sock)
            sock.close()

    def close_late(self) -> None:
        """Close those that had time to reply."""
        while self._evict_oldest():
            pass

    def close(self) -> None:
        """Close all pending connections, and wait for no more. May be called again."""
        # Without `unregister`: a fork shares the kernel's epoll object with its parent, and must
        # not take the parent's connections out of it.
        self._selector.close()
        for sock in self._pending:
            sock.close()
        self._pending.clear()

    def _accept_one(self) -> bool:
        """Accept a connection and send the nonce; return False if there is no room for it yet."""
        if len(self._pending) >= MAX_PENDING and not self._evict_oldest():
            return False
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            return error.errno not in (errno.EMFILE, errno.ENFILE) or self._evict_oldest()
        pending = _PendingConnection(sock)
        try:
            if not _is_own_user(sock):
                sock.close()
                return True
            sock.setblocking(False)
            # 40 bytes fit the buffer of any new socket, so that this cannot block or send a part.
            sock.sendall(MAGIC + pending.nonce)
        except OSError:
            sock.close()
            return True
        self._pending[sock] = pending
        self._selector.register(sock, selectors.EVENT_READ, pending)
        return True

    def _read_reply(self, pending: _PendingConnection) -> bool:
        """Read a reply; return whether it is complete, and stop tracking the connection then.

        A connection that is at its end is closed.
        """
        try:
            chunk = pending.socket.recv(_REPLY.size - len(pending.reply))
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        pending.reply += chunk
        if chunk and len(pending.reply) < _REPLY.size:
            return False
        self._remove(pending.socket)
        if not chunk:
            pending.socket.close()
        return bool(chunk)

    def _evict_oldest(self) -> bool:
        """Close the oldest connection if it had time to reply; return whether it had."""
        oldest = next(iter(self._pending.values()), None)
        if oldest is None or time.monotonic() - oldest.since < _REPLY_WITHIN_S:
            return False
        self._remove(oldest.socket)
        oldest.socket.close()
        return True

    def _remove(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._pending[sock]


class Endpoint:
    """A listening socket and, for a Unix socket, its private directory: the server's side.

    Args:
        host: Listen on a free TCP port of this address; None for a Unix socket.
        token: What a receiver must know to be admitted, 32 bytes.

    Attributes:
        address: The argument of `dial`.
        directory: The private directory (0700); None with TCP.
        host: The argument.
    """

    def __init__(self, *, host: str | None, token: bytes) -> None:
        self.host = host
        self.directory: Path | None = None
        self._token = token
        self._private: PrivateDirectory | None = None
        self._listener = socket.socket(socket.AF_UNIX if host is None else socket.AF_INET)
        self._pending = _PendingConnections(self._listener)
        try:
            if host is None:
                self._private = PrivateDirectory(PREFIX, most_characters=_MOST_CHARACTERS)
                self.directory = self._private.path
                _listen_unix(self._listener, self.directory / "control")
                self.address = f"unix:{self.directory / 'control'}"
            else:
                remove_abandoned(PREFIX)
                _listen_tcp(self._listener, host)
                self.address = f"tcp:{host}:{self._listener.getsockname()[1]}"
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return a descriptor, for a selector, that is readable if `admit` has something to do."""
        return self._pending.fileno()

    def accept(
        self,
        count: int,
        *,
        deadline: Deadline,
        present: Mapping[int, Channel] | None = None,
        ranks: Collection[int] | None = None,
        least: int | None = None,
        patience_s: float = math.inf,
    ) -> dict[int, Channel]:
        """Return the channels of `count` receivers by rank, once that many are connected.

        A connection of another user, or without the token, is closed; a silent one delays no other
        and is closed at the end. A second connection of a rank replaces the first. Handshakes that
        have only just begun at the end go on at the next call: they may be of a receiver that was
        dropped.

        Args:
            count: Number of ranks to wait for.
            deadline: Limit for all of them together.
            present: Channels of ranks that are connected already; closed if this call fails.
            ranks: The ranks to wait for, `count` of them; others that connect are returned as well.
                None: any.
            least: How many are enough after `patience_s`. None: `count`.
            patience_s: How long to wait for more than `least`, in seconds.

        Raises:
            RefitTimeoutError: Fewer ranks connected in time.
        """
        channels: dict[int, Channel] = dict(present or {})
        impatient_at = time.monotonic() + patience_s
        try:
            while (found := _num_wanted(channels, ranks)) < count:
                left = deadline.remaining(f"connection: {sorted(channels)} of {count} receivers")
                if least is not None and found >= least:
                    left = min(left, impatient_at - time.monotonic())
                    if left <= 0:
                        break
                self._admit(left, channels)
        except BaseException as error:
            for channel in channels.values():
                channel.close(error)
            self.turn_away()
            raise
        # What has arrived by now was in time.
        self._admit(0.0, channels)
        self._pending.close_late()
        return channels

    def turn_away(self) -> None:
        """Close connections whose handshake has begun: nothing follows that they could wait for."""
        self._pending.close_pending()

    def admit(self, *, settle_s: float = 0.0) -> dict[int, Channel]:
        """Return the channels of those that have authenticated by now, by rank.

        The handshakes that have begun go on at the next call.

        Args:
            settle_s: How long to wait for the end of handshakes that have begun, in seconds.
        """
        channels: dict[int, Channel] = {}
        give_up = time.monotonic() + settle_s
        self._admit(0.0, channels)
        while self._pending.num_pending and (left := give_up - time.monotonic()) > 0:
            self._admit(left, channels)
        return channels

    def close(self) -> None:
        """Stop listening and remove the directory. May be called again."""
        self._pending.close()
        self._listener.close()
        if self._private is not None:
            self._private.close()

    def _admit(self, seconds: float, channels: dict[int, Channel]) -> None:
        """Wait for replies at most that long; add the channels of those that authenticate."""
        for pending in self._pending.wait(seconds):
            admitted = _authenticate(pending, self._token)
            if admitted is None:
                pending.socket.close()
                continue
            rank, channel = admitted
            # The latest wins: a restarted receiver connects before the old one's socket is found
            # dead.
            if rank in channels:
                channels[rank].close()
            channels[rank] = channel


def _num_wanted(channels: Mapping[int, Channel], ranks: Collection[int] | None) -> int:
    return len(channels) if ranks is None else len(channels.keys() & set(ranks))


def dial(address: str, deadline: Deadline) -> socket.socket:
    """Return a socket connected to an `Endpoint.address`.

    Raises:
        RefitError: No sender listens there.
        RefitTimeoutError: Its backlog stays full.
    """
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    try:
        if kind == "unix":
            return _connect_unix(rest, deadline)
        return socket.create_connection((host, int(port)), deadline.remaining("connection"))
    except OSError as error:
        remove_remains(address)
        raise RefitError(f"no sender listens on {address}: {error}") from error


def address_towards(host: str, port: int) -> str:
    """Return the address by which `host` reaches this machine. Nothing is sent."""
    # Connecting a datagram socket looks up the route and sends no packet.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def remove_remains(address: str, *, within_s: float = 0.0) -> None:
    """Remove the files of a sender, if it is dead or dies within that time."""
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


def connect(sock: socket.socket, *, token: bytes, rank: int, deadline: Deadline) -> Channel:
    """Return the authenticated channel of a connected socket: the client's side of the handshake.

    Raises:
        AuthenticationError: The server does not know the token, or rejected this side.
        RefitTimeoutError: The server does not answer. It only does while it waits for receivers.
    """
    hello = _read_answer(sock, len(MAGIC) + NONCE_BYTES, deadline)
    if hello[: len(MAGIC)] != MAGIC:
        raise AuthenticationError(f"the endpoint does not speak {MAGIC.decode()}")
    own = secrets.token_bytes(NONCE_BYTES)
    # Both nonces and the rank: a proof is of no use in another connection or for another rank.
    transcript = hello[len(MAGIC) :] + own + struct.pack("!I", rank)
    sock.sendall(_REPLY.pack(own, rank, _prove(token, b"client", transcript)))
    answer = _read_answer(sock, _MAC_BYTES, deadline)
    if not hmac.compare_digest(answer, _prove(token, b"server", transcript)):
        raise AuthenticationError("the endpoint does not know the token")
    return Channel(
        sock,
        peer="the sender",
        send_key=_prove(token, b"to server", transcript),
        receive_key=_prove(token, b"to client", transcript),
    )


def _authenticate(pending: _PendingConnection, token: bytes) -> tuple[int, Channel] | None:
    nonce, rank, proof = _REPLY.unpack(pending.reply)
    transcript = pending.nonce + nonce + struct.pack("!I", rank)
    if not hmac.compare_digest(proof, _prove(token, b"client", transcript)):
        return None
    try:
        pending.socket.sendall(_prove(token, b"server", transcript))
    except OSError:
        return None
    channel = Channel(
        pending.socket,
        peer=f"receiver {rank}",
        send_key=_prove(token, b"to client", transcript),
        receive_key=_prove(token, b"to server", transcript),
    )
    return rank, channel


def _connect_unix(path: str, deadline: Deadline) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        while True:
            sock.settimeout(deadline.remaining("room in the sender's backlog"))
            try:
                sock.connect(path)
            except BlockingIOError:
                # With a time limit, a Unix socket does not wait for room as a TCP socket does.
                time.sleep(_NO_ROOM_PAUSE_S)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


def _listen_unix(listener: socket.socket, path: Path) -> None:
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(_BACKLOG)


def _listen_tcp(listener: socket.socket, host: str) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, 0))
    listener.listen(_BACKLOG)


def _is_own_user(sock: socket.socket) -> bool:
    # A second barrier behind the modes of socket and directory; over TCP there is only the token.
    if sock.family != socket.AF_UNIX:
        return True
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return user == os.geteuid()


def _read_answer(sock: socket.socket, size: int, deadline: Deadline) -> bytes:
    # An endpoint closes the connection of a side that does not know the token, without a message.
    rejected = AuthenticationError("the endpoint rejected this connection")
    return read_exactly(sock, size, deadline, "answer of the sender's endpoint", at_end=rejected)


def _prove(token: bytes, role: bytes, transcript: bytes) -> bytes:
    # The role prevents reflecting a proof back as the other side's, and separates the keys.
    return hmac.digest(token, b"rl-refit/1 " + role + b":" + transcript, "sha256")
