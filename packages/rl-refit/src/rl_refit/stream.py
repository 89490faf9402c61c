"""The pipeline: one loop that fills buckets, and one that loads them.

The sender takes the next tensor from its source before it waits for a free buffer, so that a
gather, the copy into one buffer and the receivers' load of the other overlap.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager

import torch

from rl_refit.control import Channel, ChannelClosed
from rl_refit.deadline import Deadline
from rl_refit.digest import DIGESTS, RunningDigest, bytes_of
from rl_refit.errors import RefitError, VerificationError
from rl_refit.failures import raise_failure
from rl_refit.messages import (
    Accepted,
    AllLoaded,
    Done,
    End,
    Failure,
    Filled,
    Loaded,
    Message,
    Offer,
    Ready,
)
from rl_refit.plan import Bucket, Piece, RefitPlan, TensorSpec
from rl_refit.report import Stopwatch
from rl_refit.transports.base import ReceivingSide, SendingSide

Load = Callable[[list[tuple[str, torch.Tensor]]], object]
NamedTensors = Iterator[tuple[str, torch.Tensor]]

_GRACE_S = 1.0
"""To read a message of which something has come."""


class Receivers:
    """The receivers of a sender: what each has answered so far."""

    def __init__(self, channels: Mapping[int, Channel], version: int, deadline: Deadline) -> None:
        self._channels = channels
        self._version = version
        self._deadline = deadline
        self._loaded = dict.fromkeys(channels, -1)
        self._accepted: set[int] = set()
        self._ready: set[int] = set()
        self.done: dict[int, Done] = {}

    def tell(self, message: Message) -> None:
        """Send a message to all."""
        for rank, channel in self._channels.items():
            with _naming(rank):
                channel.send(message, self._deadline)

    def offer(self, rank: int, offer: Offer, descriptors: list[int]) -> None:
        """Tell a receiver what it is going to be sent, and pass it files."""
        with _naming(rank):
            self._channels[rank].send(offer, self._deadline)
            if descriptors:
                self._channels[rank].send_descriptors(descriptors, self._deadline)

    def wait_accepted(self) -> None:
        """Wait until all have opened their ends."""
        self._wait(lambda: self._channels.keys() - self._accepted, "answer to the offer")

    def are_ready(self, listener: socket.socket) -> bool:
        """Wait until all take part; return False if somebody knocks at the listener instead."""
        return self._wait(
            lambda: self._channels.keys() - self._ready, "answer to the beginning", until=listener
        )

    def wait_loaded(self, plan: RefitPlan, bucket: int) -> None:
        """Wait until all have loaded that bucket and those before it."""
        if bucket < 0:
            return
        self._wait(
            lambda: {rank for rank, last in self._loaded.items() if last < bucket},
            "word that the bucket is loaded",
            bucket=bucket,
            tensor=plan.label(plan.buckets[bucket]),
        )

    def wait_done(self) -> None:
        """Wait until all have loaded everything."""
        self._wait(lambda: self._channels.keys() - self.done.keys(), "word that all is loaded")

    def _wait(
        self,
        missing: Callable[[], set[int]],
        waited_for: str,
        *,
        bucket: int | None = None,
        tensor: str | None = None,
        until: socket.socket | None = None,
    ) -> bool:
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            if until is not None:
                selector.register(until, selectors.EVENT_READ)
            while ranks := missing():
                left = self._deadline.remaining(
                    waited_for, rank=min(ranks), bucket=bucket, tensor=tensor
                )
                for key, _ in selector.select(left):
                    if key.fileobj is until:
                        return False
                    self._hear(key.data)
        return True

    def hear_out(self) -> None:
        """Take in what has come: a receiver that failed may have said why."""
        for rank, channel in self._channels.items():
            while channel.has_input():
                self._hear(rank)

    def _hear(self, rank: int) -> None:
        try:
            message = self._channels[rank].receive(self._deadline.extended(_GRACE_S))
        except ChannelClosed as error:
            bucket = self._loaded[rank] + 1
            raise RefitError(f"the receiver is gone: {error}", rank=rank, bucket=bucket) from error
        match message:
            case Failure():
                raise_failure(message, origin=f"receiver {rank}")
            case Accepted():
                self._accepted.add(rank)
            case Ready(version) if version == self._version:
                self._ready.add(rank)
            case Loaded(version, bucket) if version == self._version:
                if bucket != self._loaded[rank] + 1:
                    raise RefitError("loaded out of order", rank=rank, bucket=bucket)
                self._loaded[rank] = bucket
            case Done(version) if version == self._version:
                self.done[rank] = message
            case _:
                raise RefitError(f"unexpected {message}", rank=rank)


@contextmanager
def _naming(rank: int) -> Generator[None]:
    try:
        yield
    except ChannelClosed as error:
        raise RefitError(f"the receiver is gone: {error}", rank=rank) from error


class OutboundStream:
    """Fills buckets from a source, announces them, and waits until they are loaded."""

    def __init__(
        self,
        plan: RefitPlan,
        side: SendingSide,
        receivers: Receivers,
        *,
        version: int,
        verify: bool,
        deadline: Deadline,
        watch: Stopwatch,
    ) -> None:
        self._plan = plan
        self._side = side
        self._receivers = receivers
        self._version = version
        self._verify = verify
        self._deadline = deadline
        self._watch = watch
        self._bytes: torch.Tensor | None = None

    def run(self, tensors: NamedTensors) -> None:
        """Send every bucket; returns when all receivers have loaded all."""
        watch = self._watch
        for bucket in self._plan.buckets:
            digest = self._fill(bucket, tensors)
            with watch.phase("wire"):
                self._publish(bucket)
                self.announce(bucket, digest)
        check_exhausted(tensors)
        with watch.phase("resume"):
            self._receivers.tell(End(self._version, len(self._plan.buckets)))
            self._receivers.wait_done()
            self._receivers.tell(AllLoaded(self._version))

    def _publish(self, bucket: Bucket) -> None:
        try:
            self._side.publish(bucket.index, bucket.nbytes, self._deadline)
        except Exception as error:
            self._receivers.hear_out()
            label = self._plan.label(bucket)
            told = f"the bucket cannot be published: {error!r}"
            raise RefitError(told, bucket=bucket.index, tensor=label) from error

    def announce(self, bucket: Bucket, digest: int) -> None:
        """Tell the receivers that a bucket may be read."""
        slot = bucket.index % len(self._side.buffers)
        self._receivers.tell(Filled(self._version, bucket.index, slot, bucket.nbytes, digest))

    def _fill(self, bucket: Bucket, tensors: NamedTensors) -> int:
        """Copy a bucket's tensors into its buffer; return its digest, or 0 unverified."""
        buffers = self._side.buffers
        buffer = buffers[bucket.index % len(buffers)][: bucket.nbytes]
        running: RunningDigest | None = None
        for piece in bucket.pieces:
            tensor = self._next_tensor(piece, tensors) if piece.start == 0 else None
            if piece is bucket.pieces[0]:
                with self._watch.phase("wire"):
                    self._receivers.wait_loaded(self._plan, bucket.index - len(buffers))
                for start, end in bucket.gaps:
                    buffer[start:end] = 0
                if self._verify and self._side.digest == "xxh3":
                    running = RunningDigest(buffer, position=bucket.index)
            with self._watch.phase("pack"):
                self._pack(piece, tensor, buffer)
            if running is not None:
                with self._watch.phase("verify"):
                    running.advance(piece.offset + piece.size)
        if not self._verify:
            return 0
        with self._watch.phase("verify"):
            if running is not None:
                return running.finish()
            return DIGESTS[self._side.digest](buffer, position=bucket.index)

    def _next_tensor(self, piece: Piece, tensors: NamedTensors) -> torch.Tensor:
        with self._watch.phase("gather"):
            return take_tensor(self._plan.specs[piece.tensor], tensors)

    def _pack(self, piece: Piece, tensor: torch.Tensor | None, buffer: torch.Tensor) -> None:
        place = buffer[piece.offset : piece.offset + piece.size]
        if piece.whole:
            assert tensor is not None
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            return
        if tensor is not None:
            self._bytes = bytes_of(tensor)
        assert self._bytes is not None
        place.copy_(self._bytes[piece.start : piece.start + piece.size])
        if piece.start + piece.size == len(self._bytes):
            self._bytes = None


def take_tensor(spec: TensorSpec, tensors: NamedTensors) -> torch.Tensor:
    """Return the next tensor of a source, held against what its metadata promised."""
    entry = next(tensors, None)
    if entry is None:
        raise RefitError("the source ends before it", tensor=spec.name)
    name, tensor = entry
    given = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
    if given != spec:
        raise RefitError(f"the source yields {given} where {spec} is planned", tensor=spec.name)
    return tensor.detach()


def check_exhausted(tensors: NamedTensors) -> None:
    """Hold a source against having more tensors than its metadata named."""
    extra = next(tensors, None)
    if extra is not None:
        raise RefitError("the source yields a tensor that is not planned", tensor=extra[0])


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
        load_keeps: bool,
        deadline: Deadline,
        watch: Stopwatch,
    ) -> None:
        self._plan = plan
        self._side = side
        self._load_keeps = load_keeps
        self._channel = channel
        self._version = version
        self._digest = None if digest is None else DIGESTS[digest]
        self._rank = rank
        self._num_buffers = num_buffers
        self._deadline = deadline
        self._watch = watch
        self._parts: torch.Tensor | None = None

    def run(self, load: Load) -> None:
        """Load every bucket; returns when all receivers of the sender have."""
        for bucket in self._plan.buckets[:1]:
            self._side.expect(bucket.index, bucket.nbytes, self._deadline)
        for bucket in self._plan.buckets:
            data = self._take(bucket)
            for following in self._plan.buckets[bucket.index + 1 : bucket.index + 2]:
                self._side.expect(following.index, following.nbytes, self._deadline)
            self._load(bucket, data, load)
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

    def _load(self, bucket: Bucket, data: torch.Tensor, load: Load) -> None:
        with self._watch.phase("load"):
            tensors = [entry for piece in bucket.pieces for entry in self._unpack(piece, data)]
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

    def _unpack(self, piece: Piece, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensor that a piece completes, if it does.

        Where the loader may hold on to it, as its layer goes on in another bucket, it is a copy.
        """
        spec = self._plan.specs[piece.tensor]
        place = data[piece.offset : piece.offset + piece.size]
        if piece.whole:
            if self._load_keeps and not piece.in_place:
                place = place.clone()
            yield spec.name, place.view(spec.dtype).view(spec.shape)
            return
        if self._parts is None or len(self._parts) < spec.nbytes:
            self._parts = torch.empty(spec.nbytes, dtype=torch.uint8, device=data.device)
        self._parts[piece.start : piece.start + piece.size] = place
        if piece.start + piece.size == spec.nbytes:
            yield spec.name, self._parts[: spec.nbytes].view(spec.dtype).view(spec.shape)
            if self._load_keeps:
                self._parts = None


def _name(message: Message) -> str:
    return str(message) if isinstance(message, Filled | End) else type(message).__name__
