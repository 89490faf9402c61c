"""The receivers as seen by their sender: the connections, and what each has answered."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from rl_refit.buffers import PieceViews
from rl_refit.errors import RefitError
from rl_refit.plan import RefitPlan
from rl_refit.protocol.channel import Channel, ChannelClosed
from rl_refit.protocol.messages import (
    Accepted,
    Done,
    Failure,
    Loaded,
    Message,
    Offer,
    Ready,
    raise_failure,
)
from rl_refit.protocol.waiting import Deadline, poll_briefly
from rl_refit.transports.base import SendingSide

_GRACE_S = 1.0
"""To read the rest of a message that has begun to arrive."""


@dataclass(slots=True)
class Connections:
    """The channels to all receivers and the buffers that these have opened.

    They last from one refit to the next, until a refit fails or a receiver is replaced.
    """

    channels: Mapping[int, Channel]
    side: SendingSide
    views: PieceViews

    def are_intact(self) -> bool:
        """Return whether every receiver is still connected; only between two refits."""
        # A receiver sends nothing then, so that anything to read is the end of its connection.
        return not any(channel.has_input() for channel in self.channels.values())

    def close(self, error: BaseException | None = None) -> None:
        """Release everything; report an error to the receivers first."""
        for channel in self.channels.values():
            channel.close(error)
        self.views.close()
        self.side.close()


class Receivers:
    """The receivers of one refit, and what each has answered so far.

    Args:
        channels: By rank.
        version: Of the refit.
        deadline: For all waits.

    Attributes:
        done: The last answer of each receiver that has loaded everything.
    """

    def __init__(self, channels: Mapping[int, Channel], version: int, deadline: Deadline) -> None:
        self._channels = channels
        self._version = version
        self._deadline = deadline
        self._last_loaded = dict.fromkeys(channels, -1)
        self._accepted: set[int] = set()
        self._ready: set[int] = set()
        self.done: dict[int, Done] = {}

    def send(self, message: Message) -> None:
        """Send a message to all."""
        for rank, channel in self._channels.items():
            with _naming(rank):
                channel.send(message, self._deadline)

    def send_offer(self, rank: int, offer: Offer, descriptors: list[int]) -> None:
        """Send a receiver its offer, and the files that belong to it."""
        with _naming(rank):
            self._channels[rank].send(offer, self._deadline)
            if descriptors:
                self._channels[rank].send_descriptors(descriptors, self._deadline)

    def wait_accepted(self) -> None:
        """Wait until all have opened their buffers."""
        self._wait(lambda: self._channels.keys() - self._accepted, "answer to the offer")

    def wait_ready(self, listener: socket.socket) -> bool:
        """Wait until all take part; return False if somebody connects to the listener instead."""
        return self._wait(
            lambda: self._channels.keys() - self._ready, "answer to the beginning", until=listener
        )

    def wait_loaded(self, plan: RefitPlan, bucket: int) -> None:
        """Wait until all have loaded that bucket and those before it."""
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
        """Process what has arrived: raises if a receiver has failed or is gone."""
        for rank, channel in self._channels.items():
            while channel.has_input():
                self._receive(rank)

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
                for key, _ in poll_briefly(partial(selector.select, 0)) or selector.select(left):
                    if key.fileobj is until:
                        return False
                    self._receive(key.data)
        return True

    def _receive(self, rank: int) -> None:
        try:
            message = self._channels[rank].receive(self._deadline.at_least(_GRACE_S))
        except ChannelClosed as error:
            bucket = self._last_loaded[rank] + 1
            raise RefitError(f"the receiver is gone: {error}", rank=rank, bucket=bucket) from error
        match message:
            case Failure():
                raise_failure(message, origin=f"receiver {rank}")
            case Accepted():
                self._accepted.add(rank)
            case Ready(version) if version == self._version:
                self._ready.add(rank)
            case Loaded(version, bucket) if version == self._version:
                if bucket != self._last_loaded[rank] + 1:
                    raise RefitError("loaded out of order", rank=rank, bucket=bucket)
                self._last_loaded[rank] = bucket
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
