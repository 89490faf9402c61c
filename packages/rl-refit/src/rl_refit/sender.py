"""The trainer's end of a refit."""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rl_refit.closing import Closing
from rl_refit.control import Channel, ChannelClosed, accept
from rl_refit.deadline import Deadline
from rl_refit.endpoint import Endpoint
from rl_refit.errors import RefitError, RefitTimeoutError
from rl_refit.joining import join_watching
from rl_refit.messages import Begin, Commit, Join, Offer, Start
from rl_refit.outbound import NamedTensors, OutboundStream, check_exhausted, take_tensor
from rl_refit.pieces import PieceViews
from rl_refit.plan import RefitPlan, default_bucket_bytes, read_specs
from rl_refit.receivers import Receivers
from rl_refit.report import RefitReport, Stopwatch
from rl_refit.source import WeightSource
from rl_refit.transports import SenderContext, SendingSide, find_transport

logger = logging.getLogger(__name__)

Verify = Literal["none", "digest", "weights"]
VERIFY_MODES = ("none", "digest", "weights")
NUM_BUFFERS = 2
"""One is filled while the other is loaded; a third only hides an uneven load, and costs memory."""

_GREETING_S = 1.0


@dataclass(slots=True)
class Session:
    """Connections to all receivers, and the buffers that they have opened."""

    channels: Mapping[int, Channel]
    side: SendingSide
    views: PieceViews

    def is_whole(self) -> bool:
        """Whether every receiver is still there."""
        # A receiver says nothing between two refits, so what can be read is its end.
        return not any(channel.has_input() for channel in self.channels.values())

    def close(self, error: BaseException | None = None) -> None:
        """Let go of everything, and tell the receivers about an error."""
        for channel in self.channels.values():
            channel.leave(error)
        self.views.close()
        self.side.close()


class RefitSender(Closing):
    """Streams a source's tensors to its receivers.

    Every wire parameter is the sender's: a receiver needs nothing but the `address`. Not to be
    used from two threads at once.

    Args:
        source: The tensors, as often as they are sent.
        transport: A name of the entry-point group `rl_refit.transports`.
        num_receivers: How many receivers take part, with distinct ranks. 0 only goes through the
            source, for a trainer rank that takes part in its gathers.
        bucket_bytes: The most bytes of a bucket, and so of each of `num_buffers` buffers; None for
            `default_bucket_bytes`: an eighth of the model, within 8 and 256 MiB.
        verify: "none"; "digest", a digest of every bucket before it is loaded; "weights", also
            the live parameters after it, where a receiver can read them back.
        timeout_s: The most seconds that `send` waits in all.
        device: Where the source's tensors are.
        num_buffers: How many buffers take turns.
        host: For a transport that crosses machines, this machine's address as others reach it.
    """

    def __init__(
        self,
        source: WeightSource,
        transport: str = "shm",
        num_receivers: int = 1,
        *,
        bucket_bytes: int | None = None,
        verify: Verify = "digest",
        timeout_s: float = 300.0,
        device: torch.device | str = "cpu",
        num_buffers: int = NUM_BUFFERS,
        host: str = "127.0.0.1",
    ) -> None:
        if verify not in VERIFY_MODES:
            raise ValueError(f"verify={verify!r} is not among {VERIFY_MODES}")
        if num_receivers < 0 or num_buffers < 1:
            raise ValueError(f"num_receivers={num_receivers}, num_buffers={num_buffers}")
        Deadline(timeout_s)
        self.plan = _plan(source, bucket_bytes)
        self._source = source
        self._transport_name = transport
        self._transport = find_transport(transport)
        self._num_receivers = num_receivers
        self._num_buffers = num_buffers
        self._verify = verify
        self._timeout_s = timeout_s
        self._device = torch.device(device)
        self._token = secrets.token_bytes(32)
        self._endpoint = None
        if num_receivers:
            self._endpoint = Endpoint(host=host if self._transport.crosses_hosts else None)
            # Also where nobody closes the sender, at the latest when the process ends.
            weakref.finalize(self, self._endpoint.close)
        self._make_stream: Callable[..., OutboundStream] = OutboundStream
        self._session: Session | None = None
        self._newcomers: dict[int, Channel] = {}
        self._loaded: int | None = None
        self._closed = False

    @property
    def address(self) -> dict[str, str | int]:
        """All that a receiver needs: strings and integers. Whoever has it can read the weights."""
        return {
            "transport": self._transport_name,
            "endpoint": self._endpoint.address if self._endpoint else "none",
            "token": self._token.hex(),
            "num_receivers": self._num_receivers,
            "bucket_bytes": self.plan.bucket_bytes,
            "num_buffers": self._num_buffers,
            "verify": self._verify,
        }

    def send(self, version: int) -> RefitReport:
        """Send every tensor; return when every receiver has loaded all of them.

        The source is gone through once, and to its end also where a receiver or the transport
        fails, as other trainer ranks may be in its gathers.

        Raises:
            RefitError: A receiver failed, or did not answer in time. No version may be committed;
                call again with any version that the receivers have not committed.
        """
        if self._closed:
            raise RefitError("the sender is closed")
        self._loaded = None
        deadline, watch = Deadline(self._timeout_s), Stopwatch()
        tensors = iter(self._source)
        try:
            if self._num_receivers:
                report = self._stream(version, tensors, deadline, watch)
            else:
                report = self._take_part(version, tensors, watch)
        except BaseException as error:
            self._drop_session(error)
            if isinstance(error, Exception):
                _go_through(tensors)
            raise
        self._loaded = version
        return report

    def commit(self, version: int) -> None:
        """Tell the receivers that the version counts; they learn it at their next call.

        Raises:
            RefitError: That version was not the last to be sent, or a receiver is gone.
        """
        if version != self._loaded:
            raise RefitError(f"version {version} was not sent: the last one was {self._loaded}")
        if self._session is None:
            return
        for rank, channel in self._session.channels.items():
            try:
                channel.send(Commit(version), Deadline(self._timeout_s))
            except ChannelClosed as error:
                raise RefitError(f"the receiver is gone: {error}", rank=rank) from error

    def close(self) -> None:
        """Let go of connections, buffers and the endpoint. May be called again."""
        self._closed = True
        for channel in self._newcomers.values():
            channel.close()
        if self._session is not None:
            self._session.close()
            self._session = None
        self._transport.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def _stream(
        self, version: int, tensors: NamedTensors, deadline: Deadline, watch: Stopwatch
    ) -> RefitReport:
        with watch.phase("pause"):
            session, receivers = self._begin(version, deadline)
        self._make_stream(
            self.plan,
            session.side,
            session.views,
            receivers,
            version=version,
            verify=self._verify != "none",
            deadline=deadline,
            watch=watch,
        ).run(tensors)
        spent = {rank: done.load_s + done.verify_s for rank, done in receivers.done.items()}
        watch.add("load", max(done.load_s for done in receivers.done.values()))
        watch.add("verify", max(done.verify_s for done in receivers.done.values()))
        return make_report(
            version, self.plan, watch, slowest_rank=max(spent, key=spent.__getitem__)
        )

    def _take_part(self, version: int, tensors: NamedTensors, watch: Stopwatch) -> RefitReport:
        with watch.phase("gather"):
            for spec in self.plan.specs:
                take_tensor(spec, tensors)
            check_exhausted(tensors)
        return make_report(version, self.plan, watch)

    def _begin(self, version: int, deadline: Deadline) -> tuple[Session, Receivers]:
        """Return the session in which all receivers take part in the refit.

        It is made anew where a receiver is gone, or where a new one takes the place of another.
        """
        assert self._endpoint is not None
        while True:
            session = self._meet(version, deadline)
            receivers = Receivers(session.channels, version, deadline)
            receivers.tell(Begin(version, self.plan.hash))
            while self._session is session:
                if receivers.are_ready(self._endpoint.listener):
                    receivers.tell(Start(version))
                    return session, receivers
                self._admit_newcomer()

    def _meet(self, version: int, deadline: Deadline) -> Session:
        assert self._endpoint is not None
        if self._session is not None and not self._session.is_whole():
            self._drop_session(None)
        if self._session is None:
            # They are closed if not all come.
            present, self._newcomers = self._newcomers, {}
            channels = accept(
                self._endpoint.listener,
                self._num_receivers,
                token=self._token,
                deadline=deadline,
                present=present,
            )
            self._session = self._open(dict(sorted(channels.items())), version, deadline)
        return self._session

    def _admit_newcomer(self) -> None:
        """Drop the session if whoever knocks is a receiver; the others connect again."""
        assert self._endpoint is not None
        with suppress(RefitTimeoutError):
            limit = Deadline(_GREETING_S)
            self._newcomers = accept(self._endpoint.listener, 1, token=self._token, deadline=limit)
            self._drop_session(None)

    def _open(self, channels: dict[int, Channel], version: int, deadline: Deadline) -> Session:
        try:
            side = self._open_side(channels)
        except BaseException as error:
            for channel in channels.values():
                channel.leave(error)
            raise
        session = Session(channels, side, PieceViews(self.plan, side.buffers))
        try:
            receivers = Receivers(channels, version, deadline)
            for rank in channels:
                grant, descriptors = side.grant(rank)
                offer = self._offer(side, grant, len(descriptors))
                receivers.offer(rank, offer, descriptors)
            receivers.wait_accepted()
            receivers.tell(Join())
            join_watching(side, deadline, receivers.hear_out)
        except BaseException as error:
            session.close(error)
            raise
        return session

    def _open_side(self, channels: dict[int, Channel]) -> SendingSide:
        assert self._endpoint is not None
        return self._transport.open_sender(
            SenderContext(
                num_buffers=self._num_buffers,
                buffer_bytes=self.plan.largest_bucket,
                ranks=tuple(channels),
                device=self._device,
                directory=self._endpoint.directory,
                host=self._endpoint.host,
                timeout_s=self._timeout_s,
            )
        )

    def _offer(self, side: SendingSide, grant: dict[str, Any], num_fds: int) -> Offer:
        wire = self.plan.to_wire()
        return Offer(wire, self._num_buffers, self._verify, side.digest, grant, num_fds)

    def _drop_session(self, error: BaseException | None) -> None:
        """Close all connections, so that the next refit begins with nothing left over."""
        if self._session is None:
            return
        self._session.close(error)
        self._session = None


def _plan(source: WeightSource, bucket_bytes: int | None) -> RefitPlan:
    specs = read_specs(source.metadata())
    if bucket_bytes is None:
        bucket_bytes = default_bucket_bytes(specs)
    return RefitPlan.of(specs, bucket_bytes)


def make_report(
    version: int, plan: RefitPlan, watch: Stopwatch, *, slowest_rank: int | None = None
) -> RefitReport:
    """Return the report of a refit that took as long as the watch says."""
    phases = ("pause", "gather", "pack", "wire", "load", "verify", "resume")
    return RefitReport(
        version=version,
        seconds=watch.total(),
        bytes=plan.nbytes,
        slowest_rank=slowest_rank,
        **{f"{phase}_s": watch.of(phase) for phase in phases},
    )


def _go_through(tensors: NamedTensors) -> None:
    """Take what is left of a source, so that no other rank waits in a gather."""
    try:
        for _ in tensors:
            pass
    except Exception as error:
        logger.warning("the source failed after the refit had: %r", error)
