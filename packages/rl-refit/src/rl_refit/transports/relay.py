"""The connections of a chain: servers of buckets, and clients that go from one to another.

A receiver tells the sender its address, and asks it for those of others. On each connection:

    server   nonce                                      32 bytes
    client   HMAC(key, nonce)                           32 bytes
    client   a request, in a frame
    server   its answer, in frames; an empty frame says that the server is alive and has to wait

A frame is `length (4 bytes), bytes`. The key comes with the grant, so that strangers get nothing;
the bytes are neither encrypted nor signed: the network between the members must be trusted.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import torch

from rl_refit.errors import RefitError
from rl_refit.protocol.waiting import Closing, Deadline
from rl_refit.transports import frames
from rl_refit.transports.frames import Address

logger = logging.getLogger(__name__)

STALL_S = 2.0
"""A peer that says nothing for so long is passed over."""

AVOID_S = 10.0
"""For so long; then it is asked again."""

ALIVE_S = 0.25
"""Between two frames of a server that has to wait."""

_HANDSHAKE_S = 5.0
_CLOSE_S = 2.0
_NO_ROOM_PAUSE_S = 0.01
_SENDER = -1
"""The sender's position in the chain."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a receiver needs to take its place.

    Attributes:
        host: The sender's address.
        port: Its port.
        key: Shared by all members, in hexadecimal digits.
        position: In the chain, from 0.
    """

    host: str
    port: int
    key: str
    position: int


class Pull(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Asks for the bytes `start:nbytes` of a bucket.

    Attributes:
        serial: The number of buckets before it, over all refits of these connections.
        bucket: Its index, which says in which buffer it is.
        start: First byte.
        nbytes: Of the bucket.
    """

    serial: int
    bucket: int
    start: int
    nbytes: int


class Register(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Tells the sender where a receiver serves what it has."""

    position: int
    host: str
    port: int


class Locate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Asks the sender where a receiver is."""

    position: int


_REQUESTS = msgspec.msgpack.Decoder(Pull | Register | Locate)


class Ring(Closing):
    """The buckets in a side's buffers, and how many bytes of each are there."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._views = [buffer.numpy().data for buffer in buffers]
        self._serials = [-1] * len(buffers)
        self._valid = [0] * len(buffers)
        self._changed = threading.Condition()
        self._error: Exception | None = None

    def view(self, bucket: int, nbytes: int) -> memoryview:
        """Return the bytes of a bucket's buffer.

        Raises:
            ConnectionError: It has not so many.
        """
        view = self._views[bucket % len(self._views)]
        if nbytes > len(view):
            raise ConnectionError(f"{nbytes} bytes are asked for of a buffer of {len(view)}")
        return view[:nbytes]

    def extend(self, bucket: int, serial: int, valid: int) -> None:
        """Note that the first `valid` bytes of a bucket are there."""
        slot = bucket % len(self._views)
        with self._changed:
            self._serials[slot], self._valid[slot] = serial, valid
            self._changed.notify_all()

    def wait_beyond(self, bucket: int, serial: int, start: int, seconds: float) -> int:
        """Wait until more than `start` bytes of a bucket are there; return how many are.

        Returns:
            `start` or less if there are no more within `seconds`.

        Raises:
            ConnectionError: Another bucket has taken its place, or this side has failed.
        """
        slot = bucket % len(self._views)

        def is_settled() -> bool:
            newer = self._serials[slot] - serial
            return bool(self._error) or newer > 0 or (newer == 0 and self._valid[slot] > start)

        with self._changed:
            self._changed.wait_for(is_settled, seconds)
            if self._error is not None:
                raise self._error
            if self._serials[slot] > serial:
                raise ConnectionError(f"bucket {bucket} is no longer here")
            return self._valid[slot] if self._serials[slot] == serial else 0

    def fail(self, error: Exception) -> None:
        """End all waits, present and future, by an error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits. May be called again."""
        self.fail(ConnectionAbortedError("this side is closed"))


class Server(Closing):
    """Serves the buckets of a ring to those who know the key, each in a thread.

    Args:
        host: This machine's address.
        key: Of the members.
        ring: The buckets.
        fetch: Called while a bucket that is asked for is not here; returns whether it is coming.
    """

    def __init__(
        self, host: str, key: bytes, ring: Ring, fetch: Callable[[Pull], bool] = lambda _: True
    ) -> None:
        self._key, self._ring, self._fetch = key, ring, fetch
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address: Address = (host, int(self._listener.getsockname()[1]))
        self.bytes_served = 0
        self._lock = threading.Lock()
        self._receivers: dict[int, Address] = {}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections. May be called again."""
        with self._lock:
            self._is_closed = True
            connections = dict(self._connections)
        for sock in (self._listener, *connections):
            frames.shut(sock)
        for thread in (self._thread, *connections.values()):
            thread.join(_CLOSE_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                time.sleep(_NO_ROOM_PAUSE_S)  # for descriptors, if it is not the end
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            with self._lock:
                if self._is_closed:
                    sock.close()
                    return
                self._connections[sock] = thread
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            # Whoever asks for what is not there, or is gone, finds the connection closed.
            with sock, contextlib.suppress(OSError, msgspec.MsgspecError):
                frames.admit(sock, self._key)
                while request := frames.receive_request(sock):
                    self._answer(sock, _REQUESTS.decode(request))
        finally:
            with self._lock:
                self._connections.pop(sock, None)

    def _answer(self, sock: socket.socket, request: Pull | Register | Locate) -> None:
        match request:
            case Pull():
                self._send_bucket(sock, request)
            case Register(position, host, port):
                self._receivers[position] = host, port
                frames.send_frame(sock, b"registered")
            case Locate(position):
                frames.send_frame(sock, msgspec.json.encode(self._receivers.get(position)))

    def _send_bucket(self, sock: socket.socket, pull: Pull) -> None:
        view, at = self._ring.view(pull.bucket, pull.nbytes), pull.start
        while at < pull.nbytes:
            is_coming = self._fetch(pull)
            end = self._ring.wait_beyond(pull.bucket, pull.serial, at, ALIVE_S)
            end = max(at, min(end, pull.nbytes))
            # Who waits for what is not coming hears nothing, and passes this one over.
            if is_coming or end > at:
                frames.send_frame(sock, view[at:end])
            with self._lock:
                self.bytes_served += end - at
            at = end


class Upstream(Closing):
    """Fills a ring in a thread, from the nearest peer before this one that answers.

    Args:
        grant: Of this receiver.
        key: Of the members.
        ring: Where the buckets go.
    """

    def __init__(self, grant: Member, key: bytes, ring: Ring) -> None:
        self._grant, self._key, self._ring = grant, key, ring
        self._avoided: dict[int, float] = {}
        self._link: socket.socket | None = None
        self._linked_to = _SENDER
        self._is_closed = False
        self._next_serial = 0
        self._lock = threading.Lock()
        self._due: queue.SimpleQueue[Pull | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pull_all, daemon=True)
        self._thread.start()

    def pull(self, pull: Pull) -> bool:
        """Receive a bucket if it is the next one; return whether it is here or coming.

        This side wants it, or the next one of the chain does: a receiver that is busy with its load
        passes buckets on.
        """
        with self._lock:
            if pull.serial == self._next_serial:
                self._next_serial += 1
                if pull.nbytes:
                    self._due.put(msgspec.structs.replace(pull, start=0))
            return pull.serial < self._next_serial

    def ask_sender(self, request: Register | Locate, deadline: Deadline) -> bytes:
        """Return the sender's answer to a request.

        Raises:
            RefitError: The sender is gone.
        """
        limit_s = deadline.remaining("answer of the head of the chain")
        try:
            with frames.connect((self._grant.host, self._grant.port), self._key, limit_s) as sock:
                frames.send_frame(sock, msgspec.msgpack.encode(request))
                return frames.receive_exactly(sock, frames.receive_length(sock))
        except OSError as error:
            raise RefitError(f"the head of the chain does not answer: {error}") from error

    def close(self) -> None:
        """End the thread. May be called again."""
        self._is_closed = True
        self._due.put(None)
        if (link := self._link) is not None:
            frames.shut(link)
        self._thread.join(_CLOSE_S)

    def _pull_all(self) -> None:
        try:
            while (pull := self._due.get()) is not None and not self._is_closed:
                self._pull(pull)
        except (OSError, RefitError) as error:
            self._ring.fail(error)
        finally:
            self._unlink()

    def _pull(self, pull: Pull) -> None:
        at = 0

        def advance(num: int) -> None:
            nonlocal at
            at += num
            # From the first byte on, as the bucket that was there before is needed no more then.
            self._ring.extend(pull.bucket, pull.serial, at)

        while at < pull.nbytes:
            position = self._nearest()
            try:
                self._receive(position, msgspec.structs.replace(pull, start=at), advance)
            except (OSError, RefitError) as error:
                self._unlink()
                if position == _SENDER or self._is_closed:
                    raise
                logger.warning(
                    "receiver %d of the chain passes over receiver %d at byte %d of bucket %d: %s",
                    self._grant.position,
                    position,
                    at,
                    pull.bucket,
                    error,
                )
                self._avoided[position] = time.monotonic() + AVOID_S

    def _nearest(self) -> int:
        """Return the position of the peer to ask."""
        now = time.monotonic()
        before = range(self._grant.position - 1, _SENDER, -1)
        return next((each for each in before if self._avoided.get(each, 0.0) < now), _SENDER)

    def _receive(self, position: int, pull: Pull, advance: Callable[[int], None]) -> None:
        """Receive a bucket into the ring from one peer; `advance` takes the number of new bytes."""
        if self._link is None or self._linked_to != position:
            self._unlink()
            self._link, self._linked_to = self._connect_to(position), position
        link, at = self._link, pull.start
        # The sender is the last resort: what waits for it has a limit of its own.
        link.settimeout(None if position == _SENDER else STALL_S)
        frames.send_frame(link, msgspec.msgpack.encode(pull))
        view = self._ring.view(pull.bucket, pull.nbytes)
        while at < pull.nbytes:
            end = at + frames.receive_length(link)
            if end > pull.nbytes:
                raise ConnectionError(f"{end} bytes arrive of a bucket of {pull.nbytes}")
            while at < end:
                num = link.recv_into(view[at:end])
                if not num:
                    raise ConnectionError("the connection has ended")
                at += num
                advance(num)

    def _connect_to(self, position: int) -> socket.socket:
        address: Address | None = (self._grant.host, self._grant.port)
        if position != _SENDER:
            answer = self.ask_sender(Locate(position), Deadline(_HANDSHAKE_S))
            address = msgspec.json.decode(answer, type=Address | None)
        if address is None:
            raise ConnectionError("it has no address")
        return frames.connect(address, self._key, STALL_S)

    def _unlink(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
