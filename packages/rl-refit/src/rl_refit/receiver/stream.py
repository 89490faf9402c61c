"""The receiver's half of the pipeline: take a bucket, compare its digest, load its tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_refit.digest import DIGESTS
from rl_refit.errors import RefitError, VerificationError
from rl_refit.plan import Bucket, RefitPlan
from rl_refit.protocol.channel import Channel
from rl_refit.protocol.messages import (
    AllLoaded,
    Done,
    End,
    Failure,
    Filled,
    Loaded,
    Message,
    raise_failure,
)
from rl_refit.protocol.waiting import Deadline
from rl_refit.report import Stopwatch
from rl_refit.transports.base import ReceivingSide

Load = Callable[[list[tuple[str, torch.Tensor]]], object]
Unpack = Callable[[Bucket, torch.Tensor], list[tuple[str, torch.Tensor]]]
"""From a bucket's bytes to the tensors that it completes and that `load` gets."""


class InboundStream:
    """Receives the buckets of one refit.

    Args:
        plan: What lies where.
        side: The receiver's end of the transport.
        channel: To the sender.
        version: Of the refit.
        digest: A key of `DIGESTS`; None without verification.
        rank: The receiver's, for error messages.
        num_buffers: The sender's.
        deadline: For all waits.
        watch: Counts the phases.
    """

    def __init__(
        self,
        plan: RefitPlan,
        side: ReceivingSide,
        channel: Channel,
        *,
        version: int,
        digest: str | None,
        rank: int,
        num_buffers: int,
        deadline: Deadline,
        watch: Stopwatch,
    ) -> None:
        self._plan = plan
        self._side = side
        self._channel = channel
        self._version = version
        self._digest = None if digest is None else DIGESTS[digest]
        self._rank = rank
        self._num_buffers = num_buffers
        self._deadline = deadline
        self._watch = watch

    def run(self, unpack: Unpack, load: Load) -> None:
        """Load every bucket; return when all are loaded here."""
        buckets = self._plan.buckets
        for bucket in buckets[:1]:
            self._side.expect(bucket.index, bucket.nbytes, self._deadline)
        for bucket in buckets:
            data = self._take(bucket)
            # A transport that posts receives does so before the load, which then overlaps.
            for following in buckets[bucket.index + 1 : bucket.index + 2]:
                self._side.expect(following.index, following.nbytes, self._deadline)
            self._load(bucket, data, unpack, load)
            self._channel.send(Loaded(self._version, bucket.index), self._deadline)
        message = self._receive("end of the refit")
        if message != End(self._version, len(buckets)):
            raise RefitError(f"{_describe(message)} arrived where the end was due", rank=self._rank)

    def finish(self) -> None:
        """Report that all is loaded and checked here; wait until it is everywhere."""
        spent = (self._watch.of("load"), self._watch.of("verify"))
        self._channel.send(Done(self._version, *spent), self._deadline)
        with self._watch.phase("resume"):
            message = self._receive("confirmation that all receivers have loaded")
        if message != AllLoaded(self._version):
            raise RefitError(f"unexpected {_describe(message)}", rank=self._rank)

    def _receive(self, waited_for: str) -> Message:
        message = self._channel.receive(self._deadline, waited_for)
        if isinstance(message, Failure):
            raise_failure(message, origin="the sender")
        return message

    def _take(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes of the bucket that is due, once they have arrived and are verified."""
        label = self._plan.label(bucket)
        with self._watch.phase("wire"):
            message = self._receive(f"bucket {bucket.index} ({label})")
            slot = bucket.index % self._num_buffers
            match message:
                case Filled(
                    version=self._version,
                    bucket=bucket.index,
                    buffer=buffer,
                    nbytes=bucket.nbytes,
                    digest=announced,
                ) if buffer == slot:
                    data = self._fetch(bucket)
                case _:
                    raise VerificationError(
                        f"{_describe(message)} arrived where {bucket.nbytes} bytes were due",
                        rank=self._rank,
                        bucket=bucket.index,
                        tensor=label,
                    )
        if self._digest is not None:
            with self._watch.phase("verify"):
                digest = self._digest(data, position=bucket.index)
            if digest != announced:
                raise VerificationError(
                    f"its digest is {digest:016x}, the sender's is {announced:016x}",
                    rank=self._rank,
                    bucket=bucket.index,
                    tensor=label,
                )
        return data

    def _fetch(self, bucket: Bucket) -> torch.Tensor:
        try:
            return self._side.fetch(bucket.index, bucket.nbytes, self._deadline)
        except Exception as error:
            # If the memory is gone because the sender has failed, its report came before.
            while self._channel.has_input():
                self._receive("message of the sender")
            raise RefitError(
                f"the bucket cannot be read: {error!r}",
                rank=self._rank,
                bucket=bucket.index,
                tensor=self._plan.label(bucket),
            ) from error

    def _load(self, bucket: Bucket, data: torch.Tensor, unpack: Unpack, load: Load) -> None:
        with self._watch.phase("load"):
            tensors = unpack(bucket, data)
            if tensors:
                try:
                    load(tensors)
                except Exception as error:
                    raise RefitError(
                        f"load failed: {error!r}",
                        rank=self._rank,
                        bucket=bucket.index,
                        tensor=self._plan.label(bucket),
                    ) from error
            del tensors
            self._side.release(bucket.index)


def _describe(message: Message) -> str:
    return str(message) if isinstance(message, Filled | End) else type(message).__name__
