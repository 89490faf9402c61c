"""The messages of a refit: small, typed, of plain values. Nothing is unpickled.

A refit, seen from the sender (S) and each of its receivers (R):

    S: Offer(plan, grant)   once per connection, with the buffers' descriptors
    R: Accepted()
    S: Join()               all have accepted: the transport's two ends may meet
    S: Begin(version)
    R: Ready(version)
    S: Start(version)       all are ready; from here on a lost connection is a failure
    S: Filled(bucket 0), Filled(bucket 1), ...   never more than there are buffers ahead
    R: Loaded(bucket 0), Loaded(bucket 1), ...
    S: End(version)
    R: Done(version)        all buckets are loaded here
    S: AllLoaded(version)   ... and at every other receiver of this sender
    S: Commit(version)      later

Either side may send `Failure` at any time; the connection is closed after it.
"""

# msgpack has no annotations.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import functools
import typing
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack

from rl_refit.errors import RefitError


class Message:
    """What a channel carries."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """What the sender dictates: the plan, the buffers and how they are verified."""

    plan: dict[str, Any]
    num_buffers: int
    verify: str
    digest: str
    grant: dict[str, Any]
    num_fds: int


@dataclass(frozen=True, slots=True)
class Accepted(Message):
    """The receiver has opened its end."""


@dataclass(frozen=True, slots=True)
class Join(Message):
    """All receivers have."""


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """A refit begins."""

    version: int
    plan_hash: str


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The receiver takes part."""

    version: int


@dataclass(frozen=True, slots=True)
class Start(Message):
    """All receivers take part."""

    version: int


@dataclass(frozen=True, slots=True)
class Filled(Message):
    """A bucket may be read."""

    version: int
    bucket: int
    buffer: int
    nbytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class Loaded(Message):
    """A bucket has been loaded; its buffer may be filled again."""

    version: int
    bucket: int


@dataclass(frozen=True, slots=True)
class End(Message):
    """All buckets have been sent."""

    version: int
    num_buckets: int


@dataclass(frozen=True, slots=True)
class Done(Message):
    """All buckets have been loaded here."""

    version: int
    load_s: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class AllLoaded(Message):
    """Every receiver of this sender has loaded the version."""

    version: int


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """The version counts from now on."""

    version: int


@dataclass(frozen=True, slots=True)
class Failure(Message):
    """The refit has failed at the side that says so."""

    kind: str
    reason: str
    rank: int | None
    bucket: int | None
    tensor: str | None


TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Offer,
        Accepted,
        Join,
        Begin,
        Ready,
        Start,
        Filled,
        Loaded,
        End,
        Done,
        AllLoaded,
        Commit,
        Failure,
    )
}


def encode(message: Message) -> bytes:
    """Return the message as bytes."""
    assert type(message).__name__ in TYPES
    content = asdict(message)  # pyright: ignore[reportArgumentType]
    return typing.cast(bytes, msgpack.packb([type(message).__name__, content]))


def decode(payload: bytes) -> Message:
    """Return the message of `encode`.

    Raises:
        RefitError: The bytes are no message, or a field has another type than it should.
    """
    try:
        name, content = msgpack.unpackb(payload, strict_map_key=False)
        kind = TYPES[name]
        message = kind(**content)
    except Exception as error:
        raise RefitError(f"unreadable message: {error!r}") from error
    for field, expected in _field_types(kind).items():
        value = getattr(message, field)
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            raise RefitError(f"{name}.{field} is {value!r}")
    return message


@functools.cache
def _field_types(kind: type[Any]) -> dict[str, tuple[type, ...]]:
    hints = typing.get_type_hints(kind)
    return {field.name: _plain_types(hints[field.name]) for field in fields(kind)}


def _plain_types(hint: Any) -> tuple[type, ...]:
    options = typing.get_args(hint) if not isinstance(hint, type) and _is_union(hint) else (hint,)
    return tuple(typing.get_origin(option) or option for option in options)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is not dict
