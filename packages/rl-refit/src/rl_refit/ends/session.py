"""A receiver's session with its sender: the connection, the plan, and the buffers it has opened."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from rl_refit.delta import Base, OwnTensors, base_bytes
from rl_refit.ends.inbound import Unpacker
from rl_refit.errors import PlanMismatchError, RefitError
from rl_refit.plan import RefitPlan, TensorSpec, WirePlan, differences, read_specs
from rl_refit.protocol.channel import (
    Accepted,
    Channel,
    Failure,
    Join,
    Message,
    Offer,
    raise_failure,
    require_message,
)
from rl_refit.protocol.endpoint import connect, dial
from rl_refit.protocol.waiting import Deadline, join_transport
from rl_refit.transports import ReceiverContext, ReceivingSide, find_transport

logger = logging.getLogger(__name__)

_MOST_DIFFERENCES = 8
"""Limit of the list in one error message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A receiver's state from one refit to the next, until either side closes the connection.

    Attributes:
        channel: To the sender.
        offer: The parameters that the sender dictates.
        plan: The offer's.
        side: The receiver's end of the transport.
        unpacker: With its memory.
        base: What patches are applied to: the engine's own tensors, or a copy from which `unpacker`
            takes them; None if the sender sends no patches, or there is no memory for it.
        pending: Messages that were read and not processed, oldest first.
    """

    channel: Channel
    offer: Offer
    plan: RefitPlan
    side: ReceivingSide
    unpacker: Unpacker
    base: Base | OwnTensors | None
    pending: list[Message]

    def close(self) -> None:
        """Release the connection and all memory."""
        self.channel.close()
        self.unpacker.close()
        if self.base is not None:
            self.base.close()
        self.side.close()


class Connector:
    """Opens sessions with one sender; takes the arguments of `RefitReceiver`."""

    def __init__(
        self,
        address: Mapping[str, str | int],
        rank: int,
        *,
        device: torch.device,
        timeout_s: float,
        expected: Iterable[tuple[str, torch.dtype, Sequence[int]]] | None,
        into: Mapping[str, torch.Tensor],
    ) -> None:
        self.endpoint = str(address["endpoint"])
        if self.endpoint == "none":
            raise ValueError("the address is of a sender with num_receivers=0")
        self._token = bytes.fromhex(str(address["token"]))
        self._transport = find_transport(str(address["transport"]))
        # How many receivers of this sender may be on this machine, each with a copy of its own.
        is_local = not self._transport.crosses_hosts
        self._num_neighbours = int(address["num_receivers"]) if is_local else 1
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        # Of `connect`, until there is a session.
        self._connecting: socket.socket | None = None
        self._expected = None if expected is None else read_specs(expected)
        self._into = {name: tensor.detach() for name, tensor in into.items()}
        for name, tensor in self._into.items():
            if not tensor.is_contiguous():
                raise ValueError(f"into: {name} is not contiguous, its stride is {tensor.stride()}")

    @property
    def has_own_tensors(self) -> bool:
        """Whether pieces are copied into tensors of the engine as they arrive."""
        return bool(self._into)

    def connect(self, deadline: Deadline) -> Session:
        """Return a new session with the sender.

        Raises:
            RefitError: No sender listens, or its offer is refused, which is reported to it.
            ChannelClosed: The sender dropped the connection.
        """
        sock = self._connecting = dial(self.endpoint, deadline)
        try:
            return self._connect(sock, deadline)
        finally:
            self._connecting = None

    def hang_up(self) -> None:
        """End a connection that another thread opens: it is woken and fails."""
        sock = self._connecting
        if sock is not None:
            with suppress(OSError):  # it may have ended by itself
                sock.shutdown(socket.SHUT_RDWR)

    def _connect(self, sock: socket.socket, deadline: Deadline) -> Session:
        try:
            channel = connect(sock, token=self._token, rank=self._rank, deadline=deadline)
        except BaseException:
            sock.close()
            raise
        try:
            return self._open(channel, deadline)
        except BaseException as error:
            channel.close(error, rank=self._rank)
            raise

    def _open(self, channel: Channel, deadline: Deadline) -> Session:
        offer = channel.receive(deadline, "offer of the sender")
        if isinstance(offer, Failure):
            raise_failure(offer, origin="the sender")
        if not isinstance(offer, Offer):
            raise RefitError(
                f"{type(offer).__name__} arrived where an offer was due", rank=self._rank
            )
        # Before the descriptors are read: the kernel closes those of a refused offer.
        plan = self._agree(offer.plan)
        descriptors: list[int] = []
        if offer.num_fds:
            descriptors = channel.receive_descriptors(offer.num_fds, deadline)
        side = self._transport.open_receiver(
            ReceiverContext(
                num_buffers=offer.num_buffers,
                buffer_bytes=plan.largest_bucket,
                grant=offer.grant,
                descriptors=descriptors,
                rank=self._rank,
                device=self._device,
                host=channel.host,
                timeout_s=self._timeout_s,
            )
        )
        pending: list[Message] = []
        try:
            self._join(channel, side, pending, deadline)
            base = self._open_base(plan, offer) if offer.delta else None
        except BaseException:
            side.close()
            raise
        return Session(
            channel=channel,
            offer=offer,
            plan=plan,
            side=side,
            unpacker=Unpacker(
                plan,
                base.buckets if isinstance(base, Base) else side.buffers,
                device=self._device,
                into=self._into,
            ),
            base=base,
            pending=pending,
        )

    def _open_base(self, plan: RefitPlan, offer: Offer) -> Base | OwnTensors | None:
        # What is live is compared with pieces in full, and a GPU's digest is of full buckets.
        is_plain = offer.verify == "digest" and offer.digest == "xxh3"
        if is_plain and OwnTensors.fit(plan, self._into):
            return OwnTensors(plan, self._into)
        base = Base.if_room(plan, copies=self._num_neighbours)
        if base is None:
            logger.warning(
                "receiver %d has no memory for a copy of %d MiB: everything is sent to it in full",
                self._rank,
                base_bytes(plan) >> 20,
            )
        return base

    def _join(
        self, channel: Channel, side: ReceivingSide, pending: list[Message], deadline: Deadline
    ) -> None:
        channel.send(Accepted(), deadline)
        waited_for = "acceptance by all receivers"
        require_message(Join(), channel.receive(deadline, waited_for), rank=self._rank)

        def watch() -> None:
            # Any other message than a failure belongs to the refit: the sender has joined.
            while not pending and channel.has_input():
                message = channel.receive(deadline)
                if isinstance(message, Failure):
                    raise_failure(message, origin="the sender")
                pending.append(message)

        join_transport(side.join, deadline, watch)

    def _agree(self, wire: WirePlan) -> RefitPlan:
        """Return the offered plan.

        Raises:
            PlanMismatchError: This side packs it differently, expects other tensors, or has other
                tensors in `into`.
        """
        try:
            plan = RefitPlan.from_wire(wire)
        except ValueError as error:
            raise PlanMismatchError(str(error), rank=self._rank) from error
        found = differences(self._expected, plan.specs) if self._expected is not None else []
        own = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in self._into.items()]
        found += differences(own, [spec for spec in plan.specs if spec.name in self._into])
        if found:
            more = len(found) - _MOST_DIFFERENCES
            listed = "; ".join(found[:_MOST_DIFFERENCES]) + (f"; {more} more" if more > 0 else "")
            raise PlanMismatchError(f"the sender's tensors differ: {listed}", rank=self._rank)
        return plan
