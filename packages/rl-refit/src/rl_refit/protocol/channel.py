"""Control messages, and the authenticated channels that carry them over a Unix socket or TCP.

Messages are typed structs, encoded as MessagePack; nothing is unpickled. Who may send which message
when is written down in `rl_refit.protocol`.

A frame is `length (4 bytes), MAC (32 bytes), payload`. The MAC is an HMAC-SHA256 over a counter and
the payload, under a key of this connection and direction: no frame can be forged, replayed, dropped
or reordered unnoticed. `rl_refit.protocol.endpoint` opens channels and derives their keys.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
from contextlib import suppress
from typing import Annotated, NoReturn

import msgspec

from rl_refit import errors
from rl_refit.errors import AuthenticationError, RefitError, RefitTimeoutError
from rl_refit.plan import WirePlan
from rl_refit.protocol.waiting import Deadline, poll_briefly

MAX_MESSAGE_BYTES = 64 << 20
_GOODBYE_S = 1.0
"""Limit for reporting a failure to a peer, or for reading its report, after a refit has failed."""
_FRAME = struct.Struct("!I32s")

Count = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A control message; the name of its class is the tag on the wire."""


class Offer(Message, frozen=True):
    """The parameters that the sender dictates: plan, buffers and verification.

    Attributes:
        plan: Tensors and bucket size; the receiver derives the buckets and compares the hash.
        num_buffers: Number of buffers, used in turn.
        verify: A mode of `RefitSender`.
        digest: A key of `rl_refit.digest.DIGESTS`.
        grant: Plain values with which the transport's receiving side opens the buffers.
        num_fds: Number of file descriptors that follow this message.
        delta: Whether the receiver is to hold what it receives, for patches, if it has the memory.
    """

    plan: WirePlan
    num_buffers: Annotated[int, msgspec.Meta(ge=1)]
    verify: str
    digest: str
    grant: dict[str, object]
    num_fds: Count
    delta: bool


class Accepted(Message, frozen=True):
    """The receiver accepts the plan and has opened the buffers."""


class Join(Message, frozen=True):
    """All receivers have accepted: the transport's sides join each other now."""


class Begin(Message, frozen=True):
    """A refit begins."""

    version: int
    plan_hash: str


class Ready(Message, frozen=True):
    """The receiver is ready for the refit.

    Attributes:
        version: Of the refit.
        base: The version that the receiver holds, and can patch; None for none.
        held: Digest of the base that the engine holds beside its adapters; None for none.
    """

    version: int
    base: int | None
    held: Count | None = None


class Start(Message, frozen=True):
    """All receivers are ready; buckets follow.

    Attributes:
        version: Of the refit.
        delta: Whether some of them may be patches of what the receivers hold.
        adapters_only: Whether they begin with the first one of adapters.
    """

    version: int
    delta: bool
    adapters_only: bool = False


class Filled(Message, frozen=True):
    """A bucket may be read.

    Attributes:
        version: Of the refit.
        bucket: Its index.
        buffer: Index of the buffer that it is in.
        nbytes: How many bytes of the buffer are to be read.
        digest: Of the full bucket.
        patch: Whether these bytes are a patch of the bucket, see `rl_refit.delta`.
    """

    version: int
    bucket: Count
    buffer: Count
    nbytes: Count
    digest: Count
    patch: bool


class Loaded(Message, frozen=True):
    """The receiver has loaded a bucket; its buffer may be filled again."""

    version: int
    bucket: Count


class End(Message, frozen=True):
    """All buckets have been sent."""

    version: int
    num_buckets: Count


class Done(Message, frozen=True):
    """The receiver has loaded all buckets.

    Attributes:
        version: Of the refit.
        load_s: Seconds spent on loading.
        verify_s: Seconds spent on verifying.
        pause_s: Seconds in which the engine has not answered.
        staged: Whether the weights are held beside those that the engine serves.
    """

    version: int
    load_s: float
    verify_s: float
    pause_s: float
    staged: bool


class AllLoaded(Message, frozen=True):
    """Every receiver of this sender has loaded the version."""

    version: int


class Commit(Message, frozen=True):
    """The loaded version becomes the committed one."""

    version: int


class Failure(Message, frozen=True):
    """The refit has failed on the side that sends this, which then closes the connection."""

    kind: str
    reason: str
    rank: int | None
    bucket: int | None
    tensor: str | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(
    Offer
    | Accepted
    | Join
    | Begin
    | Ready
    | Start
    | Filled
    | Loaded
    | End
    | Done
    | AllLoaded
    | Commit
    | Failure
)

# Raised as the same class here; any other error of a peer becomes a plain `RefitError`.
_KINDS: dict[str, type[RefitError]] = {
    kind.__name__: kind
    for kind in (
        errors.PlanMismatchError,
        errors.VerificationError,
        errors.RefitTimeoutError,
        errors.StaleVersionError,
    )
}


def encode(message: Message) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """Return the message of `encode`.

    Raises:
        RefitError: The bytes are not a message, or a field is missing, unknown, of another type or
            out of range.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise RefitError(f"unreadable message: {error}") from error


def failure_of(error: BaseException, *, rank: int | None = None) -> Failure:
    """Return the message that reports an error to the other side.

    Args:
        error: Raised on this side.
        rank: The receiver's rank, if the error does not have one itself.
    """
    if isinstance(error, RefitError):
        known = error.rank if error.rank is not None else rank
        return Failure(type(error).__name__, error.reason, known, error.bucket, error.tensor)
    return Failure(RefitError.__name__, repr(error), rank, None, None)


def raise_failure(failure: Failure, *, origin: str) -> NoReturn:
    """Raise the error that the other side reported."""
    kind = _KINDS.get(failure.kind, RefitError)
    raise kind(
        f"{origin} reports: {failure.reason}",
        rank=failure.rank,
        bucket=failure.bucket,
        tensor=failure.tensor,
    )


def require_message(due: Message, message: Message, *, rank: int) -> None:
    """Raise `RefitError` unless the sender's message is `due`; a `Failure` raises its error."""
    if isinstance(message, Failure):
        raise_failure(message, origin="the sender")
    if message != due:
        raise RefitError(f"{type(message).__name__} arrived where {due} was due", rank=rank)


class ChannelClosed(ConnectionError):
    """The other side has closed the connection."""


class Channel:
    """An authenticated connection.

    Args:
        sock: Connected; the channel takes ownership.
        peer: Name of the other side, for errors.
        send_key: Key of the MACs that are sent, 32 bytes.
        receive_key: Key of the MACs that are received, 32 bytes.
    """

    def __init__(
        self, sock: socket.socket, *, peer: str, send_key: bytes, receive_key: bytes
    ) -> None:
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            # Messages are small and most of them are waited for: do not delay them to batch them.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._input = select.poll()
        self._input.register(sock, select.POLLIN)
        self._hang_up = select.poll()
        self._hang_up.register(sock, select.POLLRDHUP)
        self._peer = peer
        self._send_key = send_key
        self._receive_key = receive_key
        self._num_sent = 0
        self._num_received = 0

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
            RefitError: The other side failed and reported it, or the message is too large.
            ChannelClosed: The other side is gone.
            RefitTimeoutError: The other side does not read.
        """
        payload = encode(message)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise RefitError(
                f"a {type(message).__name__} of {len(payload)} bytes, at most {MAX_MESSAGE_BYTES} "
                "are sent"
            )
        mac = _seal(self._send_key, self._num_sent, payload)
        # Even if sending fails: a frame that was sent in part must not be repeated.
        self._num_sent += 1
        try:
            self._socket.settimeout(deadline.remaining("room for a message"))
            self._socket.sendall(_FRAME.pack(len(payload), mac) + payload)
        except TimeoutError as error:
            raise RefitTimeoutError(
                f"no room for a message within {deadline.seconds:g} s"
            ) from error
        except OSError as error:
            self._drain_failure()
            raise ChannelClosed(str(error)) from error

    def receive(self, deadline: Deadline, waited_for: str = "message") -> Message:
        """Return the next message.

        Raises:
            ChannelClosed: The other side is gone.
            RefitTimeoutError: No message arrived in time.
            AuthenticationError: The frame is not the other side's next one.
            RefitError: The frame is authentic and does not decode.
        """
        poll_briefly(self.has_input)
        length, mac = _FRAME.unpack(self._read(_FRAME.size, deadline, waited_for))
        # Before the payload is read, as nothing authenticates the length until its MAC is checked.
        if length > MAX_MESSAGE_BYTES:
            raise AuthenticationError(
                f"a message of {length} bytes, at most {MAX_MESSAGE_BYTES} are read"
            )
        payload = self._read(length, deadline, waited_for)
        if not hmac.compare_digest(mac, _seal(self._receive_key, self._num_received, payload)):
            raise AuthenticationError("a frame is not the next one that the other side sent")
        self._num_received += 1
        return decode(payload)

    def has_input(self) -> bool:
        """Return whether a message, or the end of the connection, can be read without waiting."""
        return bool(self._input.poll(0))

    def has_hung_up(self) -> bool:
        """Return whether the other side has closed; unread messages may be left."""
        return bool(self._hang_up.poll(0))

    def send_descriptors(self, descriptors: list[int], deadline: Deadline) -> None:
        """Pass open files to the other side, which must call `receive_descriptors` next.

        Raises:
            RefitError: The other side failed and reported it.
            ChannelClosed: The other side is gone.
        """
        try:
            self._socket.settimeout(deadline.remaining("room for descriptors"))
            socket.send_fds(self._socket, [b"F"], descriptors)
        except OSError as error:
            self._drain_failure()
            raise ChannelClosed(str(error)) from error

    def receive_descriptors(self, count: int, deadline: Deadline) -> list[int]:
        """Return the open files that the other side passes, which the caller closes.

        Raises:
            ChannelClosed: The other side is gone, or passed another number of files.
        """
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

    def hang_up(self) -> None:
        """End the connection for both sides: a thread that waits for a message is woken.

        Unlike `close` it keeps the descriptor, whose number another file could get meanwhile.
        """
        with suppress(OSError):  # the other side may have ended it
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, error: BaseException | None = None, *, rank: int | None = None) -> None:
        """Close the connection; the other side can still read what was sent before.

        Args:
            error: Reported to the other side first, if given.
            rank: The receiver's rank, see `failure_of`.
        """
        if error is not None:
            # Best effort: the other side may be gone, which is often what `error` says.
            with suppress(ChannelClosed, RefitError):
                self.send(failure_of(error, rank=rank), Deadline(_GOODBYE_S))
        self._socket.close()

    def _drain_failure(self) -> None:
        """Raise the failure that the other side reported before it closed, if any."""
        message: Message | None = None
        with suppress(ChannelClosed, RefitError):
            while not isinstance(message, Failure):
                message = self.receive(Deadline(_GOODBYE_S))
        if isinstance(message, Failure):
            raise_failure(message, origin=self._peer)

    def _read(self, size: int, deadline: Deadline, waited_for: str) -> bytes:
        at_end = ChannelClosed("the connection was closed")
        return read_exactly(self._socket, size, deadline, waited_for, at_end=at_end)


def read_exactly(
    sock: socket.socket, size: int, deadline: Deadline, waited_for: str, *, at_end: Exception
) -> bytes:
    """Return the next `size` bytes of a connection.

    Raises:
        RefitTimeoutError: The deadline has passed.
        ChannelClosed: The connection has failed.
        Exception: `at_end`, where the other side has closed it.
    """
    data = bytearray()
    while len(data) < size:
        try:
            sock.settimeout(deadline.remaining(waited_for))
            # Never past the frame: the kernel attaches passed descriptors to the byte after it.
            chunk = sock.recv(min(size - len(data), 1 << 20))
        except TimeoutError:
            continue
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not chunk:
            raise at_end
        data += chunk
    return bytes(data)


def _seal(key: bytes, counter: int, payload: bytes) -> bytes:
    return hmac.digest(key, struct.pack("!Q", counter) + payload, "sha256")
