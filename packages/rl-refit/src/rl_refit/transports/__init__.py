"""What a transport is: how the bytes of a bucket get from a sender to its receivers.

It is memory that a sender fills and receivers read. Everything else, that is the plan, the
messages, verification and failure, is the same for all. A transport of one's own is a subclass of
`Transport`, registered under the entry-point group `rl_refit.transports`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar

import torch

from rl_refit.protocol.waiting import Deadline

GROUP = "rl_refit.transports"

__all__ = [
    "Context",
    "Grant",
    "ReceiverContext",
    "ReceivingSide",
    "SenderContext",
    "SendingSide",
    "Transport",
    "expandable_segments",
    "find_transport",
]

Grant = dict[str, object]
"""What a receiving side needs to open its buffers: strings, numbers, bytes, lists and dicts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The arguments of either side.

    Attributes:
        num_buffers: How many buffers take turns; bucket `k` is in buffer `k % num_buffers`.
        buffer_bytes: Bytes of each.
        device: Where the source's tensors are, or where `load` wants them.
        host: This machine's address that the other side's machines reach, if they connect by TCP.
        timeout_s: Limit of one refit, in seconds.
    """

    num_buffers: int
    buffer_bytes: int
    device: torch.device
    host: str | None
    timeout_s: float

    @property
    def memory_bytes(self) -> int:
        """Bytes of all buffers together."""
        return self.num_buffers * self.buffer_bytes

    def buffers_of(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the buffers as views of `memory` (`[memory_bytes]` or more, uint8)."""
        return [*memory[: self.memory_bytes].view(self.num_buffers, self.buffer_bytes)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderContext(Context):
    """The arguments of a sending side.

    Attributes:
        ranks: The receivers' ranks, in ascending order.
        directory: A private directory (0700) that is removed when the sender closes or dies; None
            if the receivers may be on other machines.
    """

    ranks: tuple[int, ...]
    directory: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverContext(Context):
    """The arguments of a receiving side.

    Attributes:
        grant: The sender's `grant`.
        descriptors: The files that the sender passed; the receiving side closes them.
        rank: This receiver's rank.
    """

    grant: Grant
    descriptors: list[int]
    rank: int


class SendingSide(ABC):
    """The sender's end.

    Attributes:
        buffers: `num_buffers` tensors `[buffer_bytes]`, uint8, into which buckets are packed.
        digest: The digest for memory of this kind, a key of `rl_refit.digest.DIGESTS`.
    """

    buffers: Sequence[torch.Tensor]
    digest: str = "xxh3"

    @abstractmethod
    def grant(self, rank: int) -> tuple[Grant, list[int]]:
        """Return what a receiver needs to open its end: plain values, and file descriptors to pass.

        This side closes the descriptors.
        """

    def join(self, deadline: Deadline) -> None:  # noqa: B027 - most have nothing to do
        """Join the receivers, each of which has its grant. Called once."""

    def publish(self, bucket: int, nbytes: int, deadline: Deadline) -> None:  # noqa: B027 - most have nothing to do
        """Make `nbytes` bytes of the bucket's buffer readable; called before it is announced."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Release the memory; receivers that still map it must be able to read on.

        Their refit has failed, so that the transport may reuse the memory for the next receivers.
        """


class ReceivingSide(ABC):
    """A receiver's end.

    Attributes:
        buffers: The memory that `fetch` returns a prefix of, for bucket `k` that of buffer
            `k % num_buffers`; empty if bucket `k` is not always fetched into the same memory.
    """

    buffers: Sequence[torch.Tensor] = ()

    def join(self, deadline: Deadline) -> None:  # noqa: B027 - most have nothing to do
        """Join the sender. Called once."""

    def expect(self, bucket: int, nbytes: int, deadline: Deadline) -> None:  # noqa: B027 - most have nothing to do
        """Prepare to receive a bucket; called before the previous one is loaded.

        Not in a refit by deltas, in which only the announcement of a bucket says how long it is.
        """

    @abstractmethod
    def fetch(self, bucket: int, nbytes: int, deadline: Deadline) -> torch.Tensor:
        """Return the bytes of an announced bucket (`[nbytes]`, uint8), valid until `release`.

        Those of a patch, of a refit by deltas, are fewer than the plan has for the bucket.
        """

    def release(self, bucket: int) -> None:  # noqa: B027 - most have nothing to do
        """Wait until the device no longer reads the bucket; called when it has been loaded."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Release the memory."""


class Transport(ABC):
    """A factory of the two ends.

    Attributes:
        crosses_hosts: Whether receivers may be on other machines; the control endpoint is then TCP.
        survives_loss: Whether a refit can go on if a receiver is gone or reads no more: none of the
            sending side's calls may wait for it, and it may read on in buffers that are refilled.
    """

    crosses_hosts: ClassVar[bool] = False
    survives_loss: ClassVar[bool] = False

    @abstractmethod
    def open_sender(self, context: SenderContext) -> SendingSide:
        """Return the sender's end."""

    @abstractmethod
    def open_receiver(self, context: ReceiverContext) -> ReceivingSide:
        """Return a receiver's end."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Release what outlives the ends that were opened. May be called again."""


def find_transport(name: str) -> Transport:
    """Return the transport registered under that name.

    Raises:
        ValueError: None is registered; the message lists those that are.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise ValueError(f"transport={name!r} is not among {sorted(found)}")
    return found[name].load()()


def expandable_segments(environment: Mapping[str, str]) -> str | None:
    """Return the setting, `NAME=value`, that makes torch allocate memory without IPC handles.

    Returns:
        None if there is no such setting.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        for setting in environment.get(name, "").split(","):
            key, _, value = setting.replace(" ", "").partition(":")
            if key == "expandable_segments" and value.lower() == "true":
                return f"{name}={environment[name]}"
    return None
