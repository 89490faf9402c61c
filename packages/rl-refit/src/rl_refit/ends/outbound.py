"""The sender's half of one refit: the answers of its receivers, and the pipeline of buckets.

The pipeline fills a bucket's buffer, digests it and announces it. It reads the next tensor from the
source before it waits for a free buffer, so that the gather of bucket k+2, the transfer of k+1 and
the receivers' load of k overlap.
"""

from __future__ import annotations

import logging
import math
import selectors
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rl_refit.buffers import PieceViews, Run, copy_all, zero_ranges
from rl_refit.delta import Base, PatchWriter, search_threads, words_of
from rl_refit.digest import DIGESTS, RunningDigest, bytes_of
from rl_refit.ends.membership import engine_of, lost_with
from rl_refit.errors import RefitError, RefitTimeoutError
from rl_refit.plan import Bucket, RefitPlan, TensorSpec
from rl_refit.protocol.channel import (
    Accepted,
    AllLoaded,
    Channel,
    ChannelClosed,
    Done,
    End,
    Failure,
    Filled,
    Loaded,
    Message,
    Offer,
    Ready,
    raise_failure,
)
from rl_refit.protocol.endpoint import Endpoint
from rl_refit.protocol.waiting import Deadline, poll_briefly
from rl_refit.report import Stopwatch, Traffic
from rl_refit.transports import SendingSide

logger = logging.getLogger(__name__)

NamedTensors = Iterator[tuple[str, torch.Tensor]]

_GRACE_S = 1.0
"""Minimum time for the rest of a message of which some bytes have arrived."""


@dataclass(slots=True)
class Connections:
    """The channels to all receivers, and the buffers that they have opened.

    Reused by every refit until one fails or a receiver is replaced. A receiver that is dropped is
    taken out of `channels`.
    """

    channels: dict[int, Channel]
    side: SendingSide
    views: PieceViews
    base: Base | None

    def are_intact(self) -> bool:
        """Return whether every receiver is still connected; only between two refits."""
        # Receivers send nothing between refits: anything readable is the end of the connection.
        return not any(channel.has_input() for channel in self.channels.values())

    def close(self, error: BaseException | None = None) -> None:
        """Release everything; first report `error` to the receivers, if given."""
        for channel in self.channels.values():
            channel.close(error)
        self.views.close()
        if self.base is not None:
            self.base.close()
        self.side.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Quorum:
    """When a refit goes on without a receiver that is lost.

    Attributes:
        least: Receivers that have to load the version.
        silence_s: Seconds without a message that is waited for, after which one is lost.
        obstacle: Why the transport cannot go on without one; empty if it can.
        per_engine: Receivers of one engine, which are lost together.
    """

    least: int
    silence_s: float
    obstacle: str = ""
    per_engine: int = 1


class Receivers:
    """The receivers of one refit, with the progress that each has reported.

    One is lost if its process ends or if it is silent for too long. It is dropped where the quorum
    allows it, so that no wait is for it any more, and fails the refit otherwise. One that reports a
    failure always fails it.

    Args:
        channels: By rank; those that are dropped are closed and removed.
        version: Of the refit.
        deadline: For all waits.
        quorum: How many may be dropped, and when.
        dropped: Takes why each receiver was dropped, by rank.
        first_bucket: Index of the first bucket that is sent.

    Attributes:
        done: The `Done` of each receiver that has loaded everything.
        bases: The version that each receiver that is ready holds and can patch, None for none.
        held: Digest of the base that the engine of each of them holds, None for none.
    """

    def __init__(
        self,
        channels: dict[int, Channel],
        version: int,
        deadline: Deadline,
        *,
        quorum: Quorum,
        dropped: dict[int, str],
        first_bucket: int = 0,
    ) -> None:
        self._channels = channels
        self._version = version
        self._deadline = deadline
        self._quorum = quorum
        self._heard_at: dict[int, float] = {}
        self._dropped = dropped
        self._last_loaded = dict.fromkeys(channels, first_bucket - 1)
        self._accepted: set[int] = set()
        self._ready: set[int] = set()
        self.done: dict[int, Done] = {}
        self.bases: dict[int, int | None] = {}
        self.held: dict[int, int | None] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that take part."""
        return tuple(self._channels)

    def send(self, message: Message) -> None:
        """Send a message to all."""
        for rank in self.ranks:
            if rank not in self._channels:
                continue  # it was lost with another one
            with self._dropping(rank):
                self._channels[rank].send(message, self._send_limit(rank))

    def send_offer(self, rank: int, offer: Offer, descriptors: list[int]) -> None:
        """Send an offer to one receiver, and the file descriptors that belong to it."""
        if rank not in self._channels:
            return  # it was lost with another one
        with self._dropping(rank):
            channel, limit = self._channels[rank], self._send_limit(rank)
            channel.send(offer, limit)
            if descriptors:
                channel.send_descriptors(descriptors, limit)

    def wait_accepted(self) -> None:
        """Wait until all have opened their buffers."""
        self._wait(lambda: self._channels.keys() - self._accepted, "answer to the offer")

    def wait_ready(self, endpoint: Endpoint) -> bool:
        """Wait until all are ready; return False if the endpoint has something to admit first."""
        return self._wait(
            lambda: self._channels.keys() - self._ready, "answer to the beginning", until=endpoint
        )

    def wait_loaded(self, plan: RefitPlan, bucket: int) -> None:
        """Wait until all have loaded the bucket and those before it; none if it is negative."""
        if bucket < 0:
            return
        self._wait(
            lambda: {rank for rank, last in self._last_loaded.items() if last < bucket},
            "confirmation that the bucket is loaded",
            bucket=bucket,
            tensor=plan.label(plan.buckets[bucket]),
        )

    def wait_done(self) -> None:
        """Wait until all have loaded everything."""
        self._wait(
            lambda: self._channels.keys() - self.done.keys(), "confirmation that all is loaded"
        )

    def read_pending(self) -> None:
        """Process all received messages; raises if a receiver has failed or is gone."""
        for rank, channel in list(self._channels.items()):
            while rank in self._channels and channel.has_input():
                self._receive(rank)

    def _wait(
        self,
        missing: Callable[[], set[int]],
        waited_for: str,
        *,
        bucket: int | None = None,
        tensor: str | None = None,
        until: Endpoint | None = None,
    ) -> bool:
        began_at = time.monotonic()
        with selectors.DefaultSelector() as selector:
            registered = dict(self._channels)
            for rank, channel in registered.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            if until is not None:
                selector.register(until, selectors.EVENT_READ)
            while ranks := missing():
                left = self._deadline.remaining(
                    waited_for, rank=min(ranks), bucket=bucket, tensor=tensor
                )
                left = min(left, self._drop_silent(ranks, waited_for, began_at))
                interrupted = False
                for key, _ in poll_briefly(partial(selector.select, 0)) or selector.select(left):
                    if key.fileobj is until:
                        interrupted = True
                        continue
                    if key.data in self._channels:
                        self._receive(key.data)
                for rank in registered.keys() - self._channels.keys():
                    selector.unregister(registered.pop(rank))
                # After the receivers' messages, which a flood of connections must not hold up.
                if interrupted and missing():
                    return False
        return True

    def _drop_silent(self, ranks: set[int], waited_for: str, began_at: float) -> float:
        """Drop those that are silent for too long; return in how many seconds to look again."""
        now, limit = time.monotonic(), self._quorum.silence_s
        silent = {
            rank: now - max(began_at, self._heard_at.get(rank, began_at))
            for rank in ranks
            if self._may_drop(rank)
        }
        if not silent:
            return math.inf
        for rank in sorted(silent):
            if silent[rank] >= limit:
                self._drop(rank, RefitTimeoutError(f"no {waited_for} within {limit:g} s"))
                # Nobody may be missing any more.
                return 0.0
        return max(0.0, limit - max(silent.values()))

    def _may_drop(self, rank: int) -> bool:
        left = self._channels.keys() - self._engine_of(rank)
        return not self._quorum.obstacle and len(left) >= self._quorum.least

    def _engine_of(self, rank: int) -> range:
        return engine_of(rank, self._quorum.per_engine)

    def _drop(self, rank: int, reason: Exception) -> None:
        """Go on without a receiver's engine, which cannot commit: it never learns that all have."""
        self._leave_out(rank, str(reason))
        for fellow in self._engine_of(rank):
            if fellow in self._channels:
                self._leave_out(fellow, lost_with(rank, str(reason)))

    def _leave_out(self, rank: int, said: str) -> None:
        self._dropped[rank] = said
        logger.warning("version %d goes on without receiver %d: %s", self._version, rank, said)
        channel = self._channels.pop(rank)
        channel.close(
            RefitError(f"the refit to version {self._version} goes on without it: {said}")
        )
        for known in (self._last_loaded, self.done, self.bases, self.held):
            known.pop(rank, None)
        self._accepted.discard(rank)
        self._ready.discard(rank)

    def _send_limit(self, rank: int) -> Deadline:
        left = self._deadline.remaining("room for a message", rank=rank)
        may_drop = self._may_drop(rank)
        return Deadline(min(left, self._quorum.silence_s)) if may_drop else self._deadline

    @contextmanager
    def _dropping(self, rank: int) -> Generator[None]:
        """Drop a receiver whose connection is lost inside, or raise `RefitError`."""
        try:
            yield
        except ChannelClosed as error:
            self._lose(rank, f"the receiver is gone: {error}", error)
        except RefitTimeoutError as error:
            if not self._may_drop(rank):
                raise
            self._drop(rank, error)

    def _lose(self, rank: int, reason: str, cause: Exception) -> None:
        if self._may_drop(rank):
            self._drop(rank, RefitError(reason))
            return
        quorum = self._quorum
        if quorum.obstacle and len(self._channels) > quorum.least:
            reason = f"{reason}; {quorum.obstacle}"
        bucket = self._last_loaded[rank] + 1
        raise RefitError(reason, rank=rank, bucket=bucket) from cause

    def _receive(self, rank: int) -> None:
        try:
            # Past the limit too: the frame that has begun to arrive may explain the timeout.
            message = self._channels[rank].receive(self._deadline.at_least(_GRACE_S))
        except ChannelClosed as error:
            self._lose(rank, f"the receiver is gone: {error}", error)
            return
        self._heard_at[rank] = time.monotonic()
        match message:
            case Failure():
                raise_failure(message, origin=f"receiver {rank}")
            case Accepted():
                self._accepted.add(rank)
            case Ready(version, base, held) if version == self._version:
                self._ready.add(rank)
                self.bases[rank], self.held[rank] = base, held
            case Loaded(version, bucket) if version == self._version:
                if bucket != self._last_loaded[rank] + 1:
                    raise RefitError("loaded out of order", rank=rank, bucket=bucket)
                self._last_loaded[rank] = bucket
            case Done(version) if version == self._version:
                self.done[rank] = message
            case _:
                raise RefitError(f"unexpected {message}", rank=rank)


@dataclass(kw_only=True)
class OutboundStream:
    """Sends the buckets of one refit.

    Attributes:
        plan: The buckets.
        side: The sender's end of the transport.
        views: The buckets' pieces as views of the side's buffers.
        receivers: Ready for this version.
        version: Of the refit.
        verify: Whether to digest buckets.
        deadline: For all waits.
        watch: Measures the phases.
        base: A copy of what was sent before, to be kept up to date; None for none.
        delta: Whether every receiver has it too, so that changes are enough.
        traffic: Counts what is sent.
        first_bucket: Index of the first bucket that is sent.
        digests: Of the buckets that were sent, in order.
    """

    plan: RefitPlan
    side: SendingSide
    views: PieceViews
    receivers: Receivers
    version: int
    verify: bool
    deadline: Deadline
    watch: Stopwatch
    base: Base | None
    delta: bool
    traffic: Traffic
    first_bucket: int = 0
    digests: list[int] = field(default_factory=list[int])
    # The bytes of a tensor that is split over buckets, from its first piece to its last.
    _split: torch.Tensor | None = None
    # How changes are searched for, see `PatchWriter`.
    _each: Callable[..., Iterator[Any]] = map

    def run(self, tensors: NamedTensors) -> None:
        """Send every bucket; return when all receivers have loaded all of them."""
        watch = self.watch
        searching = search_threads() if self.delta else nullcontext(map)
        with searching as self._each:
            for bucket in self.plan.buckets[self.first_bucket :]:
                filled = self.fill(bucket, tensors)
                self.digests.append(filled.digest)
                with watch.phase("wire"):
                    self._publish(bucket, filled.nbytes)
                    self.announce(filled)
                self.traffic.bytes_sent += filled.nbytes
        # Before `End`: a source that disagrees with its metadata fails the refit everywhere.
        check_exhausted(tensors)
        with watch.phase("resume"):
            self.receivers.send(End(self.version, len(self.plan.buckets)))
            self.receivers.wait_done()
            self.receivers.send(AllLoaded(self.version))

    def announce(self, filled: Filled) -> None:
        """Announce to all receivers that a bucket may be read."""
        self.receivers.send(filled)

    def fill(self, bucket: Bucket, tensors: NamedTensors) -> Filled:
        """Write a bucket's tensors or their changes into its buffer; return its announcement."""
        buffers = self.side.buffers
        slot = bucket.index % len(buffers)
        buffer, nbytes = buffers[slot][: bucket.nbytes], bucket.nbytes
        if self.delta:
            nbytes, digest = self._fill_changes(bucket, buffer, tensors)
        else:
            digest = self._fill_all(bucket, buffer, tensors)
        is_patch = nbytes < bucket.nbytes
        return Filled(self.version, bucket.index, slot, nbytes, digest, is_patch)

    def _fill_changes(
        self, bucket: Bucket, buffer: torch.Tensor, tensors: NamedTensors
    ) -> tuple[int, int]:
        """Write a patch into the buffer, or the full bucket where that is as small.

        Returns:
            The bytes in the buffer, and the digest of the full bucket.
        """
        assert self.base is not None
        content = self.base.buckets[bucket.index]
        writer = PatchWriter(self.base.words(bucket), self.base.slices(bucket), each=self._each)
        running = self._start_digest(bucket, content)
        for run in self.views.of(bucket):
            with self.watch.phase("gather"):
                taken = self._take(run, tensors)
            with self.watch.phase("pack"):
                for tensor in taken:
                    for end in writer.add(words_of(tensor)):
                        if running is not None:
                            running.advance(end)
        if running is not None:
            # It ran between two slices, and counts as "verify".
            self.watch.add("pack", -running.seconds)
            self.watch.add("verify", running.seconds)
        digest = self._finish_digest(bucket, content, running)
        self.traffic.num_words += bucket.nbytes // 2
        self.traffic.num_changed += writer.num_changed
        self._wait_for_room(bucket)
        with self.watch.phase("pack"):
            if writer.nbytes < bucket.nbytes:
                return writer.write(buffer), digest
            buffer.copy_(content)
        return bucket.nbytes, digest

    def _fill_all(self, bucket: Bucket, buffer: torch.Tensor, tensors: NamedTensors) -> int:
        """Copy a bucket's tensors into its buffer; return its digest, or 0 without verification."""
        running: RunningDigest | None = None
        for run in self.views.of(bucket):
            with self.watch.phase("gather"):
                taken = self._take(run, tensors)
            # Only now: the gather of the first tensors overlaps with the receivers' load of the
            # bucket that still occupies the buffer.
            if run.pieces[0] is bucket.pieces[0]:
                running = self._make_room(bucket, buffer)
            with self.watch.phase("pack"):
                copy_all(run.views, taken)
            if running is not None:
                with self.watch.phase("verify"):
                    running.advance(run.end)
        if self.base is not None:
            with self.watch.phase("pack"):
                self.base.update(bucket, buffer)
        return self._finish_digest(bucket, buffer, running)

    def _publish(self, bucket: Bucket, nbytes: int) -> None:
        try:
            self.side.publish(bucket.index, nbytes, self.deadline)
        except Exception as error:
            # If a receiver has failed, its report explains the error better.
            self.receivers.read_pending()
            raise RefitError(
                f"the bucket cannot be published: {error!r}",
                bucket=bucket.index,
                tensor=self.plan.label(bucket),
            ) from error

    def _make_room(self, bucket: Bucket, buffer: torch.Tensor) -> RunningDigest | None:
        """Wait until the bucket's buffer is free; return its running digest, if there is one."""
        self._wait_for_room(bucket)
        # The digest covers the gaps as well, which still hold bytes of an earlier bucket.
        zero_ranges(buffer, bucket.gaps)
        return self._start_digest(bucket, buffer)

    def _start_digest(self, bucket: Bucket, data: torch.Tensor) -> RunningDigest | None:
        """Return the digest of a bucket's bytes as they are written, if its kind can be one."""
        if self.verify and self.side.digest == "xxh3":
            return RunningDigest(data, position=bucket.index)
        return None

    def _wait_for_room(self, bucket: Bucket) -> None:
        with self.watch.phase("wire"):
            previous = bucket.index - len(self.side.buffers)
            self.receivers.wait_loaded(self.plan, previous)

    def _finish_digest(
        self, bucket: Bucket, data: torch.Tensor, running: RunningDigest | None
    ) -> int:
        if not self.verify:
            return 0
        with self.watch.phase("verify"):
            if running is not None:
                return running.finish()
            return DIGESTS[self.side.digest](data, position=bucket.index)

    def _take(self, run: Run, tensors: NamedTensors) -> list[torch.Tensor]:
        """Return the content of a run: the source's next tensors, or a piece of a split tensor."""
        first = run.pieces[0]
        if first.is_full:
            return [take_tensor(self.plan.specs[piece.tensor], tensors) for piece in run.pieces]
        if first.start == 0:
            self._split = bytes_of(take_tensor(self.plan.specs[first.tensor], tensors))
        assert self._split is not None
        part = self._split[first.start : first.start + first.size]
        if first.start + first.size == len(self._split):
            self._split = None
        return [part]


def take_tensor(spec: TensorSpec, tensors: NamedTensors) -> torch.Tensor:
    """Return the next tensor of a source.

    Raises:
        RefitError: There is none, or it differs from the source's metadata.
    """
    entry = next(tensors, None)
    if entry is None:
        raise RefitError("the source ends before this tensor", tensor=spec.name)
    name, tensor = entry
    if name != spec.name or tensor.dtype != spec.dtype or tensor.shape != spec.shape:
        given = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        raise RefitError(f"the source yields {given} where {spec} is planned", tensor=spec.name)
    return tensor.detach() if tensor.requires_grad else tensor


def check_exhausted(tensors: NamedTensors) -> None:
    """Raise `RefitError` if a source has more tensors than its metadata."""
    extra = next(tensors, None)
    if extra is not None:
        raise RefitError("the source yields a tensor that is not planned", tensor=extra[0])
