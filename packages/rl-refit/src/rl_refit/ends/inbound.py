"""The receiver's half of one refit: fetch a bucket, compare its digest, load its tensors.

`InboundStream` is the pipeline, `Unpacker` turns buckets into tensors, and `LiveWeights` compares
the engine's live parameters with what was received, for `verify="weights"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rl_refit.buffers import PieceViews, copy_all, view_runs
from rl_refit.delta import Base, OwnTensors, apply_patch
from rl_refit.digest import DIGESTS, bytes_of, tensor_digest
from rl_refit.errors import RefitError, VerificationError
from rl_refit.plan import Bucket, Piece, RefitPlan, TensorSpec
from rl_refit.protocol.channel import (
    AllLoaded,
    Channel,
    Done,
    End,
    Failure,
    Filled,
    Loaded,
    Message,
    raise_failure,
)
from rl_refit.protocol.waiting import Deadline
from rl_refit.report import Stopwatch, Traffic
from rl_refit.transports import ReceivingSide

Load = Callable[[list[tuple[str, torch.Tensor]]], object]
Unpack = Callable[[Bucket, torch.Tensor], list[tuple[str, torch.Tensor]]]
"""Takes a bucket and its bytes; returns the tensors that it completes, for `load`."""
Observer = Callable[[TensorSpec, int, torch.Tensor], None]
"""Takes the spec of a piece's tensor, the piece's offset in it in bytes, and the piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InboundStream:
    """Receives the buckets of one refit.

    Attributes:
        plan: The buckets.
        side: The receiver's end of the transport.
        channel: To the sender.
        version: Of the refit.
        digest: A key of `DIGESTS`; None without verification.
        rank: The receiver's rank, for error messages.
        num_buffers: The sender's.
        deadline: For all waits.
        watch: Measures the phases.
        base: What was received before, to be kept up to date; None for none.
        delta: Whether patches of it may arrive.
        traffic: Counts what arrives.
        first_bucket: Index of the first bucket that arrives.
        digests: Of the buckets that have arrived, in order.
    """

    plan: RefitPlan
    side: ReceivingSide
    channel: Channel
    version: int
    digest: str | None
    rank: int
    num_buffers: int
    deadline: Deadline
    watch: Stopwatch
    base: Base | OwnTensors | None
    delta: bool
    traffic: Traffic
    first_bucket: int = 0
    digests: list[int] = field(default_factory=list[int])

    def run(self, unpack: Unpack, load: Load) -> None:
        """Load every bucket."""
        buckets = self.plan.buckets
        # Those of a delta have sizes that only their announcement tells.
        expected = () if self.delta else buckets
        for bucket in expected[self.first_bucket : self.first_bucket + 1]:
            self.side.expect(bucket.index, bucket.nbytes, self.deadline)
        for bucket in buckets[self.first_bucket :]:
            data = self._take(bucket)
            # Before the load, so that a transport that posts receives overlaps them with it.
            for following in expected[bucket.index + 1 : bucket.index + 2]:
                self.side.expect(following.index, following.nbytes, self.deadline)
            self._load(bucket, data, unpack, load)
            self.channel.send(Loaded(self.version, bucket.index), self.deadline)
        message = self._receive("end of the refit")
        if message != End(self.version, len(buckets)):
            raise RefitError(f"{_describe(message)} arrived where the end was due", rank=self.rank)

    def finish(self, *, pause_s: float, staged: bool) -> None:
        """Report that all buckets are loaded; wait until every other receiver has reported it.

        Args:
            pause_s: See `Done`.
            staged: See `Done`.
        """
        spent = (self.watch.of("load"), self.watch.of("verify"))
        self.channel.send(Done(self.version, *spent, pause_s, staged), self.deadline)
        with self.watch.phase("resume"):
            message = self._receive("confirmation that all receivers have loaded")
        if message != AllLoaded(self.version):
            raise RefitError(f"unexpected {_describe(message)}", rank=self.rank)

    def _receive(self, waited_for: str) -> Message:
        message = self.channel.receive(self.deadline, waited_for)
        if isinstance(message, Failure):
            raise_failure(message, origin="the sender")
        return message

    def _take(self, bucket: Bucket) -> torch.Tensor | None:
        """Receive the bucket that is due; return its bytes if their digest is the sender's.

        They are those of a copy, if there is one. None: a patch was applied to the engine's own
        tensors.
        """
        label = self.plan.label(bucket)
        with self.watch.phase("wire"):
            message = self._receive(f"bucket {bucket.index} ({label})")
            slot = bucket.index % self.num_buffers
            # An announcement that was lost, repeated or reordered differs from the one due.
            match message:
                case Filled(
                    version=self.version,
                    bucket=bucket.index,
                    buffer=buffer,
                    nbytes=nbytes,
                    digest=announced,
                    patch=is_patch,
                ) if buffer == slot and self._is_due(bucket, nbytes, is_patch=is_patch):
                    data = self._fetch(bucket, nbytes)
                case _:
                    raise VerificationError(
                        f"{_describe(message)} arrived where {bucket.nbytes} bytes were due",
                        rank=self.rank,
                        bucket=bucket.index,
                        tensor=label,
                    )
        self.traffic.bytes_sent += nbytes
        self.digests.append(announced)
        if is_patch:
            with self.watch.phase("load"):
                self._apply(bucket, data)
        if self.digest is not None:
            with self.watch.phase("verify"):
                if is_patch:
                    assert self.base is not None
                    digest = self.base.digest(bucket, self.digest)
                else:
                    digest = DIGESTS[self.digest](data, position=bucket.index)
            if digest != announced:
                raise VerificationError(
                    f"its digest is {digest:016x}, the sender's is {announced:016x}",
                    rank=self.rank,
                    bucket=bucket.index,
                    tensor=label,
                )
        if not isinstance(self.base, Base):
            return None if is_patch else data
        if not is_patch:
            with self.watch.phase("load"):
                self.base.update(bucket, data)
        return self.base.buckets[bucket.index]

    def _is_due(self, bucket: Bucket, nbytes: int, *, is_patch: bool) -> bool:
        """Return whether so many bytes may arrive: no more than a buffer has in either case."""
        if is_patch:
            return self.delta and nbytes < bucket.nbytes
        return nbytes == bucket.nbytes

    def _fetch(self, bucket: Bucket, nbytes: int) -> torch.Tensor:
        try:
            return self.side.fetch(bucket.index, nbytes, self.deadline)
        except Exception as error:
            # If the memory is gone because the sender has failed, its report is already here, and
            # explains the error better.
            while self.channel.has_input():
                self._receive("message of the sender")
            raise self._failure(bucket, f"the bucket cannot be read: {error!r}") from error

    def _apply(self, bucket: Bucket, patch: torch.Tensor) -> None:
        """Bring the base's bucket up to date."""
        assert self.base is not None
        try:
            apply_patch(self.base.places(bucket), patch)
        except ValueError as error:
            label = self.plan.label(bucket)
            raise VerificationError(
                str(error), rank=self.rank, bucket=bucket.index, tensor=label
            ) from error

    def _load(self, bucket: Bucket, data: torch.Tensor | None, unpack: Unpack, load: Load) -> None:
        with self.watch.phase("load"):
            tensors = [] if data is None else unpack(bucket, data)
            if tensors:
                try:
                    load(tensors)
                except RefitError:
                    raise
                except Exception as error:
                    raise self._failure(bucket, f"load failed: {error!r}") from error
            # Views must not outlive `release`, after which the sender refills the buffer.
            del tensors
            self.side.release(bucket.index)

    def _failure(self, bucket: Bucket, reason: str) -> RefitError:
        label = self.plan.label(bucket)
        return RefitError(reason, rank=self.rank, bucket=bucket.index, tensor=label)


def _describe(message: Message) -> str:
    return str(message) if isinstance(message, Filled | End) else type(message).__name__


class Unpacker:
    """Turns buckets into tensors; its memory is reused by every refit.

    Args:
        plan: The buckets.
        buffers: The memory in which buckets are; bucket `k` is in buffer `k % len(buffers)`, or in
            none if this is empty, see `ReceivingSide.buffers`.
        device: Where `load` expects its tensors.
        into: The engine's own tensors by name, into which pieces are copied as they arrive.
    """

    def __init__(
        self,
        plan: RefitPlan,
        buffers: Sequence[torch.Tensor],
        *,
        device: torch.device,
        into: Mapping[str, torch.Tensor],
    ) -> None:
        self._plan = plan
        self._device = device
        self._into = into
        # Views can be cached only if a bucket always arrives in the same memory, on this device.
        is_stable = bool(buffers) and all(buffer.device == device for buffer in buffers)
        self._views = PieceViews(plan, buffers) if is_stable else None
        self._partial = torch.empty(0, dtype=torch.uint8)
        self._scratch = [self._partial, self._partial]

    @property
    def scratch_bytes(self) -> int:
        """The memory kept to assemble split tensors."""
        return sum(len(memory) for memory in self._scratch)

    def unpack(
        self, bucket: Bucket, data: torch.Tensor, *, load_keeps: bool, observe: Observer | None
    ) -> list[tuple[str, torch.Tensor]]:
        """Copy pieces into the tensors of `into`; return the other tensors that are complete now.

        Args:
            bucket: The next one in order.
            data: Its bytes, `[nbytes]`, uint8.
            load_keeps: Clone tensors whose layer continues in another bucket.
            observe: Called with each piece, before it is copied.
        """
        if self._views is None:
            runs = view_runs(self._plan, bucket, data.to(self._device))
        else:
            runs = self._views.of(bucket)
        tensors: list[tuple[str, torch.Tensor]] = []
        for run in runs:
            targets: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            for piece, view in zip(run.pieces, run.views, strict=True):
                spec = self._plan.specs[piece.tensor]
                if observe is not None:
                    observe(spec, piece.start, view)
                if (own := self._into.get(spec.name)) is not None:
                    targets.append(own if piece.is_full else _bytes_of_piece(own, piece))
                    sources.append(view)
                elif (tensor := self._complete(spec, piece, view, load_keeps)) is not None:
                    tensors.append((spec.name, tensor))
            if targets:
                copy_all(targets, sources)
        return tensors

    def close(self) -> None:
        """Release all memory."""
        self._partial = torch.empty(0, dtype=torch.uint8)
        self._scratch = [self._partial, self._partial]
        if self._views is not None:
            self._views.close()

    def _complete(
        self, spec: TensorSpec, piece: Piece, view: torch.Tensor, load_keeps: bool
    ) -> torch.Tensor | None:
        """Return the full tensor, or None until the last of its pieces has been assembled."""
        if piece.is_full:
            return view.clone() if load_keeps and not piece.has_layer else view
        if piece.start == 0:
            self._partial = self._room(spec.nbytes, load_keeps)
        self._partial[piece.start : piece.start + piece.size] = view
        if piece.start + piece.size < spec.nbytes:
            return None
        return self._partial.view(spec.dtype).view(spec.shape)

    def _room(self, nbytes: int, load_keeps: bool) -> torch.Tensor:
        if load_keeps:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Two alternate: a bucket may complete one split tensor and begin the next, and `load` reads
        # the first while the second is being assembled.
        self._scratch.reverse()
        if len(self._scratch[0]) < nbytes:
            self._scratch[0] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._scratch[0][:nbytes]


def _bytes_of_piece(own: torch.Tensor, piece: Piece) -> torch.Tensor:
    return bytes_of(own)[piece.start : piece.start + piece.size]


@dataclass(slots=True)
class _Received:
    """The pieces of one tensor as `(start, size, digest)`, and the device of the digests."""

    spec: TensorSpec
    device: torch.device
    pieces: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])


class LiveWeights:
    """The digests of all tensors received in one refit, to compare live parameters with.

    Args:
        watch: Measures the time of digests as "verify".

    Attributes:
        checked: Whether the live parameters were compared and are equal.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._received: dict[str, _Received] = {}
        self._watch = watch
        self.checked = False

    def observe(self, spec: TensorSpec, start: int, piece: torch.Tensor) -> None:
        """Digest a piece, which begins at byte `start` of its tensor."""
        with self._watch.phase("verify"):
            received = self._received.setdefault(spec.name, _Received(spec, piece.device))
            received.pieces.append((start, piece.nbytes, tensor_digest(piece)))

    def check(self, tensors: Iterable[tuple[str, torch.Tensor]], *, rank: int) -> None:
        """Compare every live tensor with what was received under its name.

        Raises:
            VerificationError: One is missing or unexpected, or differs in dtype, shape or a bit.
        """
        missing = dict(self._received)
        for name, tensor in tensors:
            if name not in self._received:
                raise VerificationError("it is live and was not received", rank=rank, tensor=name)
            missing.pop(name, None)
            received = self._received[name]
            live = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
            if live != received.spec:
                raise VerificationError(
                    f"{live} is live, {received.spec} was received", rank=rank, tensor=name
                )
            # On the device of the received piece, as the CPU and the GPU use different digests.
            data = bytes_of(tensor.detach().to(received.device))
            for start, size, digest in received.pieces:
                if tensor_digest(data[start : start + size]) != digest:
                    raise VerificationError("its live values differ", rank=rank, tensor=name)
        for name in missing:
            raise VerificationError("it was received and is not live", rank=rank, tensor=name)
        self.checked = True
