"""The receivers, as their sender sees them."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial

from rl_refit.control import Channel, ChannelClosed
from rl_refit.deadline import Deadline
from rl_refit.errors import RefitError
from rl_refit.failures import raise_failure
from rl_refit.messages import Accepted, Done, Failure, Loaded, Message, Offer, Ready
from rl_refit.plan import RefitPlan
from rl_refit.waiting import look_first

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
                for key, _ in look_first(partial(selector.select, 0)) or selector.select(left):
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
