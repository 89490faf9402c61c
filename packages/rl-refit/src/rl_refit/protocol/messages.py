"""The control messages of a refit: typed structs, encoded as MessagePack. Nothing is unpickled.

Who may send which message when is written down in `rl_refit.protocol.transaction`.
"""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import msgspec

from rl_refit import errors
from rl_refit.errors import RefitError
from rl_refit.plan import WirePlan

Count = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """What a channel carries; the name of the class goes over the wire as its tag."""


class Offer(Message, frozen=True):
    """What the sender dictates: the plan, the buffers and how buckets are verified.

    Attributes:
        plan: Tensors and bucket size; the receiver derives the buckets and compares the hash.
        num_buffers: How many buffers take turns.
        verify: A mode of `RefitSender`.
        digest: A key of `rl_refit.digest.DIGESTS`.
        grant: What the transport's receiving side needs to open the buffers, plain values.
        num_fds: How many file descriptors follow this message.
    """

    plan: WirePlan
    num_buffers: Annotated[int, msgspec.Meta(ge=1)]
    verify: str
    digest: str
    grant: dict[str, Any]
    num_fds: Count


class Accepted(Message, frozen=True):
    """The receiver agrees to the plan and has opened the buffers."""


class Join(Message, frozen=True):
    """All receivers have accepted: the transport's sides may join each other."""


class Begin(Message, frozen=True):
    """A refit begins."""

    version: int
    plan_hash: str


class Ready(Message, frozen=True):
    """The receiver takes part."""

    version: int


class Start(Message, frozen=True):
    """All receivers take part."""

    version: int


class Filled(Message, frozen=True):
    """A bucket may be read."""

    version: int
    bucket: Count
    buffer: Count
    nbytes: Count
    digest: Count


class Loaded(Message, frozen=True):
    """The receiver has loaded a bucket; its buffer may be filled again."""

    version: int
    bucket: Count


class End(Message, frozen=True):
    """All buckets have been sent."""

    version: int
    num_buckets: Count


class Done(Message, frozen=True):
    """The receiver has loaded all buckets, in so many seconds of loading and verifying."""

    version: int
    load_s: float
    verify_s: float


class AllLoaded(Message, frozen=True):
    """Every receiver of this sender has loaded the version."""

    version: int


class Commit(Message, frozen=True):
    """The loaded version becomes the committed one."""

    version: int


class Failure(Message, frozen=True):
    """The refit has failed at the side that sends this; it closes the connection next."""

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

# What arrives as the same class; any other error of a peer is a plain `RefitError` here.
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
        RefitError: The bytes are no message; a field is missing, unknown, of another type or
            out of range.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise RefitError(f"unreadable message: {error}") from error


def failure_of(error: BaseException, *, rank: int | None = None) -> Failure:
    """Return the message that reports an error to the other side.

    Args:
        error: What was raised here.
        rank: The receiver's rank, where the error does not name one itself.
    """
    if isinstance(error, RefitError):
        known = error.rank if error.rank is not None else rank
        return Failure(type(error).__name__, error.reason, known, error.bucket, error.tensor)
    return Failure(RefitError.__name__, repr(error), rank, None, None)


def raise_failure(failure: Failure, *, origin: str) -> NoReturn:
    """Raise the error that the other side has reported."""
    kind = _KINDS.get(failure.kind, RefitError)
    raise kind(
        f"{origin} reports: {failure.reason}",
        rank=failure.rank,
        bucket=failure.bucket,
        tensor=failure.tensor,
    )
