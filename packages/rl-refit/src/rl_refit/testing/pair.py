"""The two ends over one transport, and faults between them that a test can inject."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rl_refit.plan import Bucket, WirePlan
from rl_refit.protocol.messages import Offer
from rl_refit.protocol.waiting import Deadline
from rl_refit.receiver import RefitReceiver
from rl_refit.sender import RefitSender
from rl_refit.sender.receivers import Connections, Receivers
from rl_refit.sender.sender import Verify
from rl_refit.sender.stream import NamedTensors, OutboundStream
from rl_refit.source import TensorSource, WeightSource
from rl_refit.transports import Grant, SendingSide


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the receivers are told when a bucket may be read."""

    bucket: int
    nbytes: int
    digest: int


class Fault:
    """What goes wrong between a sender and its receivers; in this base class nothing does."""

    def announce(self, due: Announcement) -> Iterable[Announcement]:
        """Return what is announced in place of `due`."""
        return [due]

    def spoil(self, bucket: int, data: torch.Tensor) -> None:
        """Change a bucket's bytes (`[nbytes]`, uint8) in place, after their digest was taken."""

    def offer(self, plan: WirePlan) -> None:
        """Change the plan that is offered, in place."""

    def begin(self, plan_hash: str) -> str:
        """Return the hash that is sent at the beginning of a refit."""
        return plan_hash


class DrillSender(RefitSender):
    """A sender into which a fault can be injected."""

    _fault: Fault | None = None

    @contextmanager
    def tampered(self, fault: Fault, *, timeout_s: float) -> Generator[None]:
        """Inject `fault` in this block, in which `send` waits at most `timeout_s`."""
        kept, self._timeout_s, self._fault = self._timeout_s, timeout_s, fault
        self._stream_class = partial(_FaultyStream, fault=fault)
        try:
            yield
        finally:
            self._timeout_s, self._fault = kept, None
            self._stream_class = OutboundStream

    def _make_offer(self, side: SendingSide, grant: Grant, num_fds: int) -> Offer:
        offer = super()._make_offer(side, grant, num_fds)
        if self._fault is not None:
            self._fault.offer(offer.plan)
        return offer

    def _begin(self, version: int, deadline: Deadline) -> tuple[Connections, Receivers]:
        if self._fault is None:
            return super()._begin(version, deadline)
        kept = self.plan
        self.plan = replace(kept, hash=self._fault.begin(kept.hash))
        try:
            return super()._begin(version, deadline)
        finally:
            self.plan = kept


class _FaultyStream(OutboundStream):
    def __init__(self, *arguments: Any, fault: Fault, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._fault = fault

    def announce(self, bucket: Bucket, digest: int) -> None:
        due = Announcement(bucket.index, bucket.nbytes, digest)
        for made in self._fault.announce(due):
            announced = replace(self._plan.buckets[made.bucket], nbytes=made.nbytes)
            super().announce(announced, made.digest)

    def fill(self, bucket: Bucket, tensors: NamedTensors) -> int:
        digest = super().fill(bucket, tensors)
        buffers = self._side.buffers
        self._fault.spoil(bucket.index, buffers[bucket.index % len(buffers)][: bucket.nbytes])
        return digest


class RefitPair:
    """Makes senders and receivers over one transport. Can be pickled, for other processes.

    Args:
        transport: A name of the entry-point group `rl_refit.transports`.
        verify: As for `RefitSender`.
        device: Where buffers and received tensors are.

    Attributes:
        is_for_processes: Whether the ends can be in different processes, so that one of them can
            be killed.
    """

    is_for_processes = True

    def __init__(
        self, transport: str, *, verify: Verify = "digest", device: torch.device | str = "cpu"
    ) -> None:
        self.transport = transport
        self.verify: Verify = verify
        self.device = device

    def open_sender(
        self,
        weights: Mapping[str, torch.Tensor] | WeightSource,
        *,
        num_receivers: int = 1,
        bucket_bytes: int = 16 << 10,
        num_buffers: int = 2,
        timeout_s: float = 20.0,
    ) -> DrillSender:
        """Return a sender; one with `num_receivers=0` only iterates over its weights."""
        return DrillSender(
            TensorSource(weights) if isinstance(weights, Mapping) else weights,
            self.transport,
            num_receivers,
            bucket_bytes=bucket_bytes,
            num_buffers=num_buffers,
            timeout_s=timeout_s,
            verify=self.verify,
            device=self.device,
        )

    def open_receiver(
        self,
        address: Mapping[str, str | int],
        rank: int = 0,
        *,
        timeout_s: float = 20.0,
        expected: Sequence[tuple[str, torch.dtype, Sequence[int]]] | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> RefitReceiver:
        """Return a receiver."""
        return RefitReceiver(
            address, rank, device=self.device, timeout_s=timeout_s, expected=expected, into=into
        )

    def tamper(self, sender: DrillSender, fault: Fault, *, timeout_s: float) -> Any:
        """Return a context in which `fault` is injected, and the sender waits `timeout_s`."""
        return sender.tampered(fault, timeout_s=timeout_s)
