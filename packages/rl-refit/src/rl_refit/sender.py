"""`RefitSender`: plans once, then streams the tensors of a source to its receivers."""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Callable, Collection
from typing import Literal

import torch

from rl_refit.adapters import check_adapters
from rl_refit.buffers import PieceViews
from rl_refit.delta import Base, base_bytes
from rl_refit.digest import digest_of_all
from rl_refit.ends.membership import Membership
from rl_refit.ends.outbound import (
    Connections,
    NamedTensors,
    OutboundStream,
    Quorum,
    Receivers,
    check_exhausted,
    take_tensor,
)
from rl_refit.errors import RefitError
from rl_refit.plan import RefitPlan, default_bucket_bytes, read_specs
from rl_refit.protocol.channel import Begin, Channel, ChannelClosed, Commit, Join, Offer, Start
from rl_refit.protocol.endpoint import Endpoint
from rl_refit.protocol.waiting import Closing, Deadline, join_transport
from rl_refit.report import RefitReport, Stopwatch, Traffic
from rl_refit.source import WeightSource
from rl_refit.transports import Grant, SenderContext, SendingSide, find_transport

logger = logging.getLogger(__name__)

Verify = Literal["none", "digest", "weights"]
VERIFY_MODES = ("none", "digest", "weights")
NUM_BUFFERS = 2
"""One is filled while the other is loaded. A third costs memory and only hides uneven loads."""

_SETTLE_S = 0.1
"""How long a refit waits for the handshake of a receiver that was dropped and connects again."""


class RefitSender(Closing):
    """Streams the tensors of a source to its receivers.

    The sender dictates every wire parameter: a receiver needs nothing but the `address`. Not
    thread-safe.

    Args:
        source: The tensors; iterated once per refit.
        transport: A name of the entry-point group `rl_refit.transports`.
        num_receivers: Number of receivers, with distinct ranks. With 0 the sender only iterates
            over the source, for a trainer rank that takes part in the gathers.
        bucket_bytes: Largest size of a bucket, and so of each of `num_buffers` buffers; None for
            `default_bucket_bytes`: an eighth of the model, between 8 and 256 MiB.
        verify: "none"; "digest" compares a digest of every bucket before it is loaded; "weights"
            also compares the live parameters after the load, if a receiver can read them back.
        timeout_s: Limit of one `send`, all waits together, in seconds.
        device: Device of the source's tensors.
        num_buffers: Number of buffers, used in turn.
        host: For a transport between machines, the address at which others reach this one.
        adapters: Low-rank adapters of tensors of `source`, which do not change while this sender
            lives: the *base*. Their names end with `.lora_A.weight` (`[r, inputs]`) and
            `.lora_B.weight` (`[outputs, r]`, already scaled) in place of `.weight`. Engines that
            hold the base apply new ones to it, see `send`. Needs `verify`.
        delta: Send only what has changed since the refit before, bit by bit. This side and each
            receiver then keep a copy of all tensors in host memory, but for one that receives into
            its engine's own tensors (`RefitReceiver(into=...)`); where that has no room, or a
            receiver is new, everything is sent in full. Worth it where the transport is slower
            than memory. Needs `verify`, and tensors that are sent from host memory.
        min_receivers: How many receivers have to hold a version before it can be committed. One
            that is lost is dropped as long as so many are left: its process has ended, or it was
            silent for `receiver_timeout_s`. One that reports a failure is not lost, and fails the
            refit. It takes part again once it has connected before a refit begins, or is named in
            `send`. A transport without `survives_loss` drops those alone that are lost before a
            refit begins. None: all of them, so that none is ever dropped.
        receiver_timeout_s: Seconds of silence, where a message is waited for, after which a
            receiver is lost. None: half of `timeout_s`.
        receivers_per_engine: Receivers of consecutive ranks that are of no use without each other,
            such as an engine's tensor-parallel workers: if one is lost, all of them are.
        keep_spans: Report when each phase ran, see `RefitReport.spans`.

    Raises:
        ValueError: An argument is out of range, the transport is not registered, or `delta` cannot
            be combined with another argument.
    """

    _stream_class: Callable[..., OutboundStream] = OutboundStream

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
        delta: bool = False,
        adapters: WeightSource | None = None,
        min_receivers: int | None = None,
        receiver_timeout_s: float | None = None,
        receivers_per_engine: int = 1,
        keep_spans: bool = False,
    ) -> None:
        if verify not in VERIFY_MODES:
            raise ValueError(f"verify={verify!r} is not among {VERIFY_MODES}")
        if num_receivers < 0 or num_buffers < 1:
            raise ValueError(
                f"num_receivers={num_receivers} is negative or num_buffers={num_buffers} is below 1"
            )
        if delta:
            check_delta(verify, torch.device(device))
        Deadline(timeout_s)
        self._members = Membership(
            num_receivers,
            min_receivers=min_receivers,
            timeout_s=timeout_s,
            receiver_timeout_s=receiver_timeout_s,
            per_engine=receivers_per_engine,
        )
        specs, adapters_from = read_specs(source.metadata()), None
        if adapters is not None:
            _check_adapters(verify, delta=delta)
            adapters_from, specs = len(specs), specs + check_adapters(specs, adapters.metadata())
        if bucket_bytes is None:
            bucket_bytes = default_bucket_bytes(specs)
        self.plan: RefitPlan = RefitPlan.of(specs, bucket_bytes, adapters_from=adapters_from)
        self._source = source
        self._adapters = adapters
        self._base_digest: int | None = None
        # Of the refit that is being sent; the ranks that it is sent to, None for all.
        self._adapters_only = False
        self._ranks: frozenset[int] | None = None
        self._transport_name = transport
        self._transport = find_transport(transport)
        self._num_receivers = num_receivers
        self._num_buffers = num_buffers
        self._verify = verify
        self._delta = delta
        self._timeout_s = timeout_s
        self._keep_spans = keep_spans
        self._device = torch.device(device)
        self._token = secrets.token_bytes(32)
        self._endpoint = None
        if num_receivers:
            self._endpoint = Endpoint(
                host=host if self._transport.crosses_hosts else None, token=self._token
            )
            # For senders that are never closed: at garbage collection or at exit.
            weakref.finalize(self, self._endpoint.close)
        self._connections: Connections | None = None
        self._newcomers: dict[int, Channel] = {}
        self._sent_version: int | None = None
        self._closed = False

    @property
    def address(self) -> dict[str, str | int]:
        """Everything a receiver needs, as strings and integers; it grants access to the weights."""
        return {
            "transport": self._transport_name,
            "endpoint": self._endpoint.address if self._endpoint else "none",
            "token": self._token.hex(),
            "num_receivers": self._num_receivers,
            "bucket_bytes": self.plan.bucket_bytes,
            "num_buffers": self._num_buffers,
            "verify": self._verify,
        }

    def send(
        self,
        version: int,
        *,
        adapters_only: bool = False,
        receivers: Collection[int] | None = None,
    ) -> RefitReport:
        """Send every tensor; return when every receiver has loaded all of them.

        The source is iterated once, and to its end even if a receiver or the transport fails, as
        other trainer ranks may be waiting in its gathers.

        Args:
            version: Of the tensors.
            adapters_only: Send adapters alone, to engines that hold the base. A digest of it shows
                that they do.
            receivers: Send to these ranks alone, and wait for them: what is known to be lost is
                left out, and an engine that has joined is brought to the version that the others
                have, which serve meanwhile. Empty: only iterate over the source. None: all that
                were not dropped.

        Raises:
            ValueError: `adapters_only` for a sender without adapters.
            RefitError: A receiver failed, or did not answer in time, or does not hold the base. No
                version can be committed; call again with any version newer than the committed one.
        """
        if adapters_only and self._adapters is None:
            raise ValueError("adapters_only=True, and this sender has no adapters")
        if self._closed:
            raise RefitError("the sender is closed")
        # Until this refit succeeds there is nothing to commit, not even the version before it.
        self._sent_version = None
        deadline = Deadline(self._timeout_s)
        watch = Stopwatch(keep_spans=self._keep_spans)
        self._adapters_only = adapters_only
        self._ranks = None if receivers is None else frozenset(receivers)
        tensors = self._tensors()
        try:
            if self._num_receivers and self._ranks != frozenset():
                report = self._stream(version, tensors, deadline, watch)
            else:
                report = self._exhaust(version, tensors, watch)
        except BaseException as error:
            self._disconnect(error)
            if self._endpoint is not None:
                self._endpoint.turn_away()
            # Not after KeyboardInterrupt or SystemExit, which must not wait for further gathers.
            if isinstance(error, Exception):
                _drain(tensors)
            raise
        self._sent_version = version
        return report

    def commit(self, version: int) -> None:
        """Commit a version at all receivers, which process the message at their next call.

        One that was lost since `send` is dropped, if `min_receivers` allows it. Otherwise no
        receiver is told to commit, and all are told that the refit has failed.

        Raises:
            RefitError: The version was not the last one sent, or a receiver is gone.
        """
        if version != self._sent_version:
            raise RefitError(
                f"version {version} was not sent: the last one was {self._sent_version}"
            )
        if self._connections is None:
            return
        channels = self._connections.channels
        lost = [rank for rank, channel in channels.items() if channel.has_hung_up()]
        gone = self._members.with_fellows(lost, channels)
        try:
            self._members.require_enough(version, channels.keys() - gone, gone)
        except RefitError as error:
            self._sent_version = None
            self._disconnect(error)
            raise
        # Over TCP a message to one that is gone is sent without an error.
        for rank in gone:
            self._commit_without(rank, version, "its connection has ended")
        for rank in list(channels):
            if rank not in channels:
                continue  # it was lost with another one
            try:
                channels[rank].send(Commit(version), Deadline(self._timeout_s))
            except ChannelClosed as error:
                # It cannot be taken back: others may have committed already.
                for fellow in self._members.with_fellows([rank], channels):
                    gone.append(fellow)
                    self._commit_without(fellow, version, str(error))
                self._members.require_enough(version, channels, gone)

    def _commit_without(self, rank: int, version: int, why: str) -> None:
        assert self._connections is not None
        reason = self._members.dropped[rank] = f"the receiver is gone: {why}"
        logger.warning("version %d is committed without receiver %d: %s", version, rank, reason)
        self._connections.channels.pop(rank).close()

    def close(self) -> None:
        """Release connections, buffers and the endpoint. May be called again."""
        self._closed = True
        for channel in self._newcomers.values():
            channel.close()
        self._disconnect(None)
        self._transport.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def _tensors(self) -> NamedTensors:
        if not self._adapters_only:
            yield from self._source
        if self._adapters is not None:
            yield from self._adapters

    def _stream(
        self, version: int, tensors: NamedTensors, deadline: Deadline, watch: Stopwatch
    ) -> RefitReport:
        with watch.phase("join"):
            connections, receivers, is_delta = self._begin(version, deadline)
        base, traffic = connections.base, Traffic()
        if base is not None:
            base.version = None
        members = self._members
        members.begin(connections.channels)
        stream = self._stream_class(
            plan=self.plan,
            side=connections.side,
            views=connections.views,
            receivers=receivers,
            version=version,
            verify=self._verify != "none",
            deadline=deadline,
            watch=watch,
            base=base,
            delta=is_delta,
            traffic=traffic,
            first_bucket=self._first_bucket,
        )
        stream.run(tensors)
        members.finish(version, connections.channels)
        if self._adapters is not None and not self._adapters_only:
            self._base_digest = digest_of_all(stream.digests[: self.plan.first_adapter_bucket])
        if base is not None:
            base.version = version
        spent = {rank: done.load_s + done.verify_s for rank, done in receivers.done.items()}
        watch.add("load", max(done.load_s for done in receivers.done.values()))
        watch.add("verify", max(done.verify_s for done in receivers.done.values()))
        watch.add("pause", max(done.pause_s for done in receivers.done.values()))
        slowest = max(spent, key=spent.__getitem__)
        staged = all(done.staged for done in receivers.done.values())
        ranks = members.dropped.keys() if self._ranks is None else self._ranks
        return watch.report(
            version,
            self.plan.nbytes,
            traffic=traffic,
            slowest_rank=slowest,
            staged=staged,
            dropped={rank: why for rank, why in members.dropped.items() if rank in ranks},
        )

    @property
    def _first_bucket(self) -> int:
        return self.plan.first_adapter_bucket if self._adapters_only else 0

    def _exhaust(self, version: int, tensors: NamedTensors, watch: Stopwatch) -> RefitReport:
        """Iterate over the source, to take part in its gathers, without receivers."""
        first = self.plan.adapters_from if self._adapters_only else 0
        with watch.phase("gather"):
            for spec in self.plan.specs[first:]:
                take_tensor(spec, tensors)
            check_exhausted(tensors)
        return watch.report(version, self.plan.nbytes)

    def _begin(self, version: int, deadline: Deadline) -> tuple[Connections, Receivers, bool]:
        """Return connections to all receivers, each of which is ready for the refit.

        Connects again if a receiver is gone, or if a new one takes its place.

        Returns:
            And whether all of them hold the version of which this side has a copy.
        """
        assert self._endpoint is not None
        while True:
            connections = self._connect(version, deadline)
            receivers = self._receivers(connections.channels, version, deadline)
            receivers.send(Begin(version, self.plan.hash))
            # `_admit_newcomer` drops the connections if a receiver was replaced: then start over.
            while self._connections is connections:
                if receivers.wait_ready(self._endpoint):
                    if self._adapters_only:
                        self._require_held(receivers)
                    is_delta = _share_base(connections.base, receivers)
                    receivers.send(Start(version, is_delta, self._adapters_only))
                    return connections, receivers, is_delta
                self._admit_newcomer()

    def _require_held(self, receivers: Receivers) -> None:
        """Raise `RefitError` unless every engine holds the base that this sender has sent."""
        for rank, held in sorted(receivers.held.items()):
            if held is None or held != self._base_digest:
                theirs = "no base" if held is None else f"the base {held:016x}"
                own = self._base_digest
                ours = "has not sent any" if own is None else f"has sent {own:016x}"
                raise RefitError(
                    f"its engine holds {theirs} and the sender {ours}: send everything",
                    rank=rank,
                )

    def _connect(self, version: int, deadline: Deadline) -> Connections:
        assert self._endpoint is not None
        if self._members.dropped:
            self._keep_newcomers(self._endpoint.admit(settle_s=_SETTLE_S))
        if self._connections is not None and not self._fits(self._connections):
            self._disconnect(None)
        if self._connections is None:
            channels = self._accept(version, deadline)
            self._connections = self._open(dict(sorted(channels.items())), version, deadline)
        return self._connections

    def _fits(self, connections: Connections) -> bool:
        """Return whether connections are those of the receivers that are sent to."""
        ranks = connections.channels.keys()
        if self._ranks is None:
            is_complete = len(ranks) >= self._members.num_expected
        else:
            is_complete = ranks == self._ranks
        return is_complete and connections.are_intact()

    def _accept(self, version: int, deadline: Deadline) -> dict[int, Channel]:
        """Return the channels of all receivers that are sent to, once they have connected."""
        assert self._endpoint is not None
        members, wanted = self._members, self._ranks
        if wanted is None:
            # First, so that all who take part are waited for at once: what `accept` has not
            # finished when enough have come, it closes.
            members.connect(self._newcomers)
        least = members.least_of(version, wanted)
        while True:
            count = max(members.num_expected, least) if wanted is None else len(wanted)
            # `accept` owns them from here on, and closes them if receivers are missing.
            present, self._newcomers = self._newcomers, {}
            channels = self._endpoint.accept(
                count,
                deadline=deadline,
                present=present,
                ranks=wanted,
                least=least,
                patience_s=members.patience_s,
            )
            self._newcomers = {
                rank: channels.pop(rank)
                for rank in list(channels)
                if wanted is not None and rank not in wanted
            }
            members.connect(channels)
            if len(channels) < count:
                members.drop_missing(channels, wanted=wanted)
                self._leave_out_dropped(channels, least)
            if wanted is not None or len(channels) >= members.num_expected:
                return channels
            # One that was dropped has come before one that is expected.
            self._newcomers = channels

    def _leave_out_dropped(self, channels: dict[int, Channel], least: int) -> None:
        """Close the channels of receivers whose engine is not complete."""
        dropped = self._members.dropped
        for rank in channels.keys() & dropped.keys():
            channels.pop(rank).close(RefitError(dropped[rank], rank=rank))
        if len(channels) < least:
            error = RefitError(
                f"{len(channels)} receivers of complete engines have connected, and {least} have "
                "to load the version"
            )
            for channel in channels.values():
                channel.close(error)
            raise error

    def _receivers(
        self, channels: dict[int, Channel], version: int, deadline: Deadline
    ) -> Receivers:
        obstacle = f"transport={self._transport_name!r} cannot go on without one that has connected"
        return Receivers(
            channels,
            version,
            deadline,
            quorum=Quorum(
                least=self._members.least_of(version, self._ranks),
                silence_s=self._members.silence_s,
                obstacle="" if self._transport.survives_loss else obstacle,
                per_engine=self._members.per_engine,
            ),
            dropped=self._members.dropped,
            first_bucket=self._first_bucket,
        )

    def _admit_newcomer(self) -> None:
        """Drop all connections if a new receiver has authenticated, to start over with it.

        A stranger that cannot authenticate, or says nothing, changes nothing and delays nobody.
        """
        assert self._endpoint is not None
        self._keep_newcomers(self._endpoint.admit())

    def _keep_newcomers(self, newcomers: dict[int, Channel]) -> None:
        """Note who has connected; drop all connections if this refit is sent to one of them."""
        for rank, channel in newcomers.items():
            if rank in self._newcomers:
                self._newcomers[rank].close()
            self._newcomers[rank] = channel
        if any(self._ranks is None or rank in self._ranks for rank in newcomers):
            self._disconnect(None)

    def _open(self, channels: dict[int, Channel], version: int, deadline: Deadline) -> Connections:
        try:
            side = self._open_side(channels)
        except BaseException as error:
            for channel in channels.values():
                channel.close(error)
            raise
        connections = Connections(channels, side, PieceViews(self.plan, side.buffers), None)
        try:
            connections.base = self._open_base()
            receivers = self._receivers(channels, version, deadline)
            # All offers before the first wait, so that receivers open their buffers concurrently.
            for rank in list(channels):
                grant, descriptors = side.grant(rank)
                offer = self._make_offer(
                    side, grant, len(descriptors), delta=connections.base is not None
                )
                receivers.send_offer(rank, offer, descriptors)
            receivers.wait_accepted()
            receivers.send(Join())
            join_transport(side.join, deadline, receivers.read_pending)
        except BaseException as error:
            connections.close(error)
            raise
        return connections

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

    def _open_base(self) -> Base | None:
        if not self._delta:
            return None
        base = Base.if_room(self.plan, copies=1)
        if base is None:
            logger.warning(
                "delta: the sender has no memory for a copy of %d MiB, everything is sent in full",
                base_bytes(self.plan) >> 20,
            )
        return base

    def _make_offer(self, side: SendingSide, grant: Grant, num_fds: int, *, delta: bool) -> Offer:
        wire = self.plan.to_wire()
        return Offer(wire, self._num_buffers, self._verify, side.digest, grant, num_fds, delta)

    def _disconnect(self, error: BaseException | None) -> None:
        """Close all connections, so that the next refit starts without unread messages."""
        if self._connections is not None:
            self._connections.close(error)
            self._connections = None


def _check_adapters(verify: Verify, *, delta: bool) -> None:
    if delta:
        raise ValueError(
            "delta=True contradicts adapters: the base is sent once, and adapters change as a whole"
        )
    if verify != "digest":
        raise ValueError(
            f"adapters contradict verify={verify!r}: only a digest shows that an engine holds the "
            'base that they belong to; take verify="digest"'
        )


def check_delta(verify: Verify, device: torch.device) -> None:
    """Raise `ValueError` if changes alone cannot be sent."""
    if verify == "none":
        raise ValueError(
            'delta=True contradicts verify="none": only the digest of the full bucket tells that a '
            'patch met the bytes that it was made for; take verify="digest"'
        )
    if device.type != "cpu":
        raise ValueError(
            f"delta=True needs buffers in host memory, and device={str(device)!r}: changes are "
            "found by the CPU; send in full"
        )


def _share_base(base: Base | None, receivers: Receivers) -> bool:
    """Return whether every receiver holds the version of which the sender has a copy."""
    if base is None or base.version is None:
        return False
    return all(version == base.version for version in receivers.bases.values())


def _drain(tensors: NamedTensors) -> None:
    """Exhaust a source, so that no other trainer rank hangs in a gather."""
    try:
        for _ in tensors:
            pass
    except Exception as error:
        logger.warning("after the refit had failed, its source failed as well: %r", error)
