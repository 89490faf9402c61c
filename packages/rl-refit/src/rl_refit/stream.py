"""The pipeline: one loop that fills buckets, and one that loads them.

The sender takes the next tensor from its source before it waits for a free buffer, so that a
gather, the copy into one buffer and the receivers' load of the other overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch

from rl_refit.control import Channel
from rl_refit.deadline import Deadline
from rl_refit.digest import DIGESTS, RunningDigest, bytes_of
from rl_refit.errors import RefitError, VerificationError
from rl_refit.failures import raise_failure
from rl_refit.messages import AllLoaded, Done, End, Failure, Filled, Loaded, Message
from rl_refit.plan import Bucket, Piece, RefitPlan, TensorSpec
from rl_refit.receivers import Receivers
from rl_refit.report import Stopwatch
from rl_refit.transports.base import ReceivingSide, SendingSide

Load = Callable[[list[tuple[str, torch.Tensor]]], object]
NamedTensors = Iterator[tuple[str, torch.Tensor]]


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
        gather_s = pack_s = 0.0
        # Some buckets have thousands of pieces: no context managers in here.
        for piece in bucket.pieces:
            start = time.perf_counter()
            spec = self._plan.specs[piece.tensor]
            tensor = take_tensor(spec, tensors) if piece.start == 0 else None
            taken = time.perf_counter()
            gather_s += taken - start
            if piece is bucket.pieces[0]:
                running = self._make_room(bucket, buffer)
                taken = time.perf_counter()
            self._pack(piece, tensor, buffer)
            pack_s += time.perf_counter() - taken
            if running is not None:
                running.advance(piece.offset + piece.size)
        self._watch.add("gather", gather_s)
        self._watch.add("pack", pack_s)
        return self._finish_digest(bucket, buffer, running)

    def _make_room(self, bucket: Bucket, buffer: torch.Tensor) -> RunningDigest | None:
        """Wait until the bucket's buffer may be filled; return its digest, if it is to have one."""
        with self._watch.phase("wire"):
            before = bucket.index - len(self._side.buffers)
            self._receivers.wait_loaded(self._plan, before)
        zero(buffer, bucket.gaps)
        if self._verify and self._side.digest == "xxh3":
            return RunningDigest(buffer, position=bucket.index)
        return None

    def _finish_digest(
        self, bucket: Bucket, buffer: torch.Tensor, running: RunningDigest | None
    ) -> int:
        if not self._verify:
            return 0
        if running is not None:
            digest = running.finish()
            self._watch.add("verify", running.seconds)
            return digest
        with self._watch.phase("verify"):
            return DIGESTS[self._side.digest](buffer, position=bucket.index)

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
    if name != spec.name or tensor.dtype != spec.dtype or tensor.shape != spec.shape:
        given = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        raise RefitError(f"the source yields {given} where {spec} is planned", tensor=spec.name)
    return tensor.detach() if tensor.requires_grad else tensor


def zero(buffer: torch.Tensor, gaps: Iterable[tuple[int, int]]) -> None:
    """Set the `[start, end)` ranges of a buffer to zero."""
    # numpy takes a fraction of the time, and there may be thousands.
    data = buffer.numpy() if buffer.device.type == "cpu" else buffer
    for start, end in gaps:
        data[start:end] = 0


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
        self._parts = torch.empty(0, dtype=torch.uint8)
        self._rooms = [self._parts, self._parts]

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
        if piece.start == 0:
            self._parts = self._room_for_parts(spec.nbytes, data.device)
        self._parts[piece.start : piece.start + piece.size] = place
        if piece.start + piece.size == spec.nbytes:
            yield spec.name, self._parts.view(spec.dtype).view(spec.shape)

    def _room_for_parts(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._load_keeps:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        # Two take turns: one may begin in the bucket in which another ends, before that is loaded.
        self._rooms.reverse()
        if len(self._rooms[0]) < nbytes:
            self._rooms[0] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._rooms[0][:nbytes]


def _name(message: Message) -> str:
    return str(message) if isinstance(message, Filled | End) else type(message).__name__
