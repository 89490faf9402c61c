"""A receiver's connection to its sender, with the buffers that it has opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rl_refit import endpoint
from rl_refit.control import Channel, connect
from rl_refit.deadline import Deadline
from rl_refit.errors import PlanMismatchError, RefitError
from rl_refit.failures import raise_failure
from rl_refit.joining import join_watching
from rl_refit.messages import Accepted, Failure, Join, Message, Offer
from rl_refit.plan import RefitPlan, TensorSpec, differences
from rl_refit.transports import ReceiverContext, ReceivingSide, find_transport
from rl_refit.unpacking import Unpacker

_MOST_DIFFERENCES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """What lasts from one refit to the next, until either side drops it.

    Attributes:
        early: Messages that have come and are not dealt with yet.
    """

    channel: Channel
    offer: Offer
    plan: RefitPlan
    side: ReceivingSide
    unpacker: Unpacker
    early: list[Message]

    def close(self) -> None:
        """Let go of the connection and of all memory."""
        self.channel.close()
        self.unpacker.close()
        self.side.close()


class Connector:
    """Makes sessions with one sender: it takes the arguments of `RefitReceiver`."""

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
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._expected = None if expected is None else [_spec(*entry) for entry in expected]
        self._into = {name: tensor.detach() for name, tensor in into.items()}
        for name, tensor in self._into.items():
            if not tensor.is_contiguous():
                raise ValueError(f"into: {name} is not contiguous, its stride is {tensor.stride()}")

    def connect(self, deadline: Deadline) -> Session:
        """Return a new session, over which the plan and the buffers have come.

        Raises:
            RefitError: The sender is not there, or the two sides do not fit. It has been told.
            ChannelClosed: The sender dropped the connection.
        """
        sock = endpoint.dial(self.endpoint, deadline)
        try:
            channel = connect(sock, token=self._token, rank=self._rank, deadline=deadline)
        except BaseException:
            sock.close()
            raise
        try:
            return self._open(channel, deadline)
        except BaseException as error:
            channel.leave(error, rank=self._rank)
            raise

    def _open(self, channel: Channel, deadline: Deadline) -> Session:
        offer = channel.receive(deadline, "offer of the sender")
        if isinstance(offer, Failure):
            raise_failure(offer, origin="the sender")
        if not isinstance(offer, Offer):
            raise RefitError(f"{type(offer).__name__} came where an offer was due", rank=self._rank)
        # Before the descriptors are taken: those of a refused offer go with the connection.
        plan = self._agree(offer)
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
        early: list[Message] = []
        try:
            self._join(channel, side, early, deadline)
        except BaseException:
            side.close()
            raise
        unpacker = Unpacker(plan, side, device=self._device, into=self._into)
        return Session(
            channel=channel, offer=offer, plan=plan, side=side, unpacker=unpacker, early=early
        )

    def _join(
        self, channel: Channel, side: ReceivingSide, early: list[Message], deadline: Deadline
    ) -> None:
        channel.send(Accepted(), deadline)
        waited_for = "acceptance by all receivers"
        expect(Join(), channel.receive(deadline, waited_for), rank=self._rank)

        def watch() -> None:
            # Anything but a failure says that the sender has met all, and is for later.
            while not early and channel.has_input():
                message = channel.receive(deadline)
                if isinstance(message, Failure):
                    raise_failure(message, origin="the sender")
                early.append(message)

        join_watching(side, deadline, watch)

    def _agree(self, offer: Offer) -> RefitPlan:
        """Return the offered plan, held against what this side expects and has."""
        try:
            plan = RefitPlan.from_wire(offer.plan)
        except (ValueError, KeyError, TypeError) as error:
            raise PlanMismatchError(str(error), rank=self._rank) from error
        found = differences(self._expected, plan.specs) if self._expected is not None else []
        own = [_spec(name, t.dtype, t.shape) for name, t in self._into.items()]
        found += differences(own, [spec for spec in plan.specs if spec.name in self._into])
        if found:
            more = len(found) - _MOST_DIFFERENCES
            told = "; ".join(found[:_MOST_DIFFERENCES]) + (f"; {more} more" if more > 0 else "")
            raise PlanMismatchError(f"the sender's tensors differ: {told}", rank=self._rank)
        return plan


def expect(due: Message, message: Message, *, rank: int) -> None:
    """Hold a message against the one that is due.

    Raises:
        RefitError: It is another, or says that the sender has failed.
    """
    if isinstance(message, Failure):
        raise_failure(message, origin="the sender")
    if message != due:
        raise RefitError(f"{type(message).__name__} came where {due} was due", rank=rank)


def _spec(name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorSpec:
    return TensorSpec(name, dtype, tuple(shape))
