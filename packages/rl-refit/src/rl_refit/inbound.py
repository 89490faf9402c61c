"""The receiver's half of the pipeline: a loop that takes buckets, checks and unpacks them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_refit.control import Channel
from rl_refit.deadline import Deadline
from rl_refit.digest import DIGESTS
from rl_refit.errors import RefitError, VerificationError
from rl_refit.failures import raise_failure
from rl_refit.messages import AllLoaded, Done, End, Failure, Filled, Loaded, Message
from rl_refit.plan import Bucket, RefitPlan
from rl_refit.report import Stopwatch
from rl_refit.transports.base import ReceivingSide

Load = Callable[[list[tuple[str, torch.Tensor]]], object]
Unpack = Callable[[Bucket, torch.Tensor], list[tuple[str, torch.Tensor]]]
"""From a bucket's bytes to the tensors that it completes and that `load` is to get."""


class InboundStream:
    """Takes buckets as they are announced, checks them, and hands their tensors to `load`."""

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
        """Load every bucket; returns when all receivers of the sender have."""
        for bucket in self._plan.buckets[:1]:
            self._side.expect(bucket.index, bucket.nbytes, self._deadline)
        for bucket in self._plan.buckets:
            data = self._take(bucket)
            for following in self._plan.buckets[bucket.index + 1 : bucket.index + 2]:
                self._side.expect(following.index, following.nbytes, self._deadline)
            self._load(bucket, data, unpack, load)
            self._channel.send(Loaded(self._version, bucket.index), self._deadline)
        message = self._receive("end of the refit")
        if message != End(self._version, len(self._plan.buckets)):
            raise RefitError(f"{_name(message)} came where the end was due", rank=self._rank)

    def finish(self) -> None:
        """Say that all is loaded here, and wait until it is everywhere."""
        spent = (self._watch.of("load"), self._watch.of("verify"))
        self._channel.send(Done(self._version, *spent), self._deadline)
        with self._watch.phase("resume"):
            message = self._receive("word that all receivers have loaded")
        if message != AllLoaded(self._version):
            raise RefitError(f"unexpected {_name(message)}", rank=self._rank)

    def _receive(self, waited_for: str) -> Message:
        message = self._channel.receive(self._deadline, waited_for)
        if isinstance(message, Failure):
            raise_failure(message, origin="the sender")
        return message

    def _take(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes of the bucket that is due, once they are there and verified."""
        where = {"rank": self._rank, "bucket": bucket.index}
        label = self._plan.label(bucket)
        with self._watch.phase("wire"):
            message = self._receive(f"bucket {bucket.index} ({label})")
            match message:
                case Filled(version, index, slot, nbytes) if (version, index, nbytes) == (
                    self._version,
                    bucket.index,
                    bucket.nbytes,
                ) and slot == index % self._num_buffers:
                    data = self._fetch(bucket)
                case _:
                    told = f"{_name(message)} came where {bucket.nbytes} bytes were due"
                    raise VerificationError(told, **where, tensor=label)
        if self._digest is not None:
            with self._watch.phase("verify"):
                digest = self._digest(data, position=bucket.index)
            if digest != message.digest:
                told = f"its digest is {digest:016x}, the sender's is {message.digest:016x}"
                raise VerificationError(told, **where, tensor=label)
        return data

    def _fetch(self, bucket: Bucket) -> torch.Tensor:
        try:
            return self._side.fetch(bucket.index, bucket.nbytes, self._deadline)
        except Exception as error:
            # Where the sender has failed and taken its memory along, it has said so before.
            while self._channel.has_input():
                self._receive("word of the sender")
            told = f"the bucket cannot be read: {error!r}"
            label = self._plan.label(bucket)
            raise RefitError(told, rank=self._rank, bucket=bucket.index, tensor=label) from error

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


def _name(message: Message) -> str:
    return str(message) if isinstance(message, Filled | End) else type(message).__name__
