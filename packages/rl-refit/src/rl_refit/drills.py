"""Senders and receivers that can be made to fail: by them a transport proves itself.

`RefitPair` is what `rl_interfaces.testing.transports` asks for. A transport of one's own that is
registered as `mine` proves itself under pytest by

    class TestMine(TransportConformance):
        pair = RefitPair("mine")
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from rl_refit import errors
from rl_refit.deadline import Deadline
from rl_refit.messages import Offer
from rl_refit.outbound import NamedTensors, OutboundStream
from rl_refit.plan import Bucket, RefitPlan
from rl_refit.receiver import RefitReceiver
from rl_refit.receivers import Receivers
from rl_refit.sender import RefitSender, Session
from rl_refit.source import TensorSource, WeightSource
from rl_refit.transports import SendingSide


@dataclass(frozen=True, slots=True)
class Notice:
    """What a receiver is told when a bucket may be read."""

    bucket: int
    nbytes: int
    digest: int


class Fault(Protocol):
    """What goes wrong between a sender and its receivers."""

    def announce(self, notice: Any) -> Iterable[Any]:
        """Return what is told in place of a `Notice`: any number of what has its attributes."""
        ...

    def spoil(self, bucket: int, data: torch.Tensor) -> None:
        """Change a bucket's bytes (`[nbytes]`, uint8) in place, after their digest was taken."""
        ...

    def offer(self, plan: dict[str, Any]) -> None:
        """Change the plan that is offered, see `RefitPlan.to_wire`."""
        ...

    def begin(self, plan_hash: str) -> str:
        """Return the hash that is told at the beginning of a refit."""
        ...


class DrillSender(RefitSender):
    """A sender that a fault may happen to."""

    plan: RefitPlan
    fault: Fault | None = None

    @contextmanager
    def tampered(self, fault: Fault, *, timeout_s: float) -> Generator[None]:
        """Let `fault` happen within the block, where `send` waits at most `timeout_s`."""
        kept, self._timeout_s, self.fault = self._timeout_s, timeout_s, fault
        self._make_stream = partial(_FaultyStream, fault=fault)
        try:
            yield
        finally:
            self._timeout_s, self.fault = kept, None
            self._make_stream = OutboundStream

    def _offer(self, side: SendingSide, grant: dict[str, Any], num_fds: int) -> Offer:
        offer = super()._offer(side, grant, num_fds)
        if self.fault is not None:
            self.fault.offer(offer.plan)
        return offer

    def _begin(self, version: int, deadline: Deadline) -> tuple[Session, Receivers]:
        if self.fault is None:
            return super()._begin(version, deadline)
        kept = self.plan
        self.plan = replace(kept, hash=self.fault.begin(kept.hash))
        try:
            return super()._begin(version, deadline)
        finally:
            self.plan = kept


class _FaultyStream(OutboundStream):
    def __init__(self, *arguments: Any, fault: Fault, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._fault = fault

    def announce(self, bucket: Bucket, digest: int) -> None:
        due = Notice(bucket.index, bucket.nbytes, digest)
        told: list[Notice] = list(self._fault.announce(due))
        for notice in told:
            index, nbytes = notice.bucket, notice.nbytes
            super().announce(replace(self._plan.buckets[index], nbytes=nbytes), notice.digest)

    def fill(self, bucket: Bucket, tensors: NamedTensors) -> int:
        digest = super().fill(bucket, tensors)
        buffers = self._side.buffers
        self._fault.spoil(bucket.index, buffers[bucket.index % len(buffers)][: bucket.nbytes])
        return digest


class RefitPair:
    """Makes the two ends over one transport.

    Args:
        transport: A name of the entry-point group `rl_refit.transports`.
        verify: As for `RefitSender`.
        device: Where buffers and received tensors are.
    """

    errors = errors
    is_for_processes = True

    def __init__(
        self, transport: str, *, verify: Any = "digest", device: torch.device | str = "cpu"
    ) -> None:
        self.transport = transport
        self.verify = verify
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
        """Return a sender."""
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
        address: Mapping[str, Any],
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

    def tamper(self, sender: Any, fault: Fault, *, timeout_s: float) -> Any:
        """Return a context within which `fault` happens to a sender of `open_sender`."""
        return sender.tampered(fault, timeout_s=timeout_s)
