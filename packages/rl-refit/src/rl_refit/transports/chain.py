"""A chain over TCP: each receiver passes a bucket on to the next one while it receives it.

    sender --> receiver 0 --> receiver 1 --> ... --> receiver n - 1

The sender sends each byte once however many receivers there are, and every receiver at most once.
A receiver asks the one before it for a bucket. If that one is gone, or silent for `STALL_S`, it
asks the one before that, from the byte on that it has reached, and at last the sender, which keeps
each bucket until all have loaded it. So a refit goes on whoever is lost. Connections: `relay`.
"""

from __future__ import annotations

import secrets

import msgspec
import torch

from rl_refit.protocol.waiting import Deadline
from rl_refit.transports import (
    Grant,
    ReceiverContext,
    ReceivingSide,
    SenderContext,
    SendingSide,
    Transport,
)
from rl_refit.transports.frames import KEY_BYTES
from rl_refit.transports.relay import (
    ALIVE_S,
    Member,
    Pull,
    Register,
    Ring,
    Server,
    Upstream,
)


class ChainTransport(Transport):
    """A bucket goes from receiver to receiver; a lost one is passed over."""

    crosses_hosts = True
    survives_loss = True

    def open_sender(self, context: SenderContext) -> SendingSide:
        """Return the head of the chain."""
        return ChainSender(context)

    def open_receiver(self, context: ReceiverContext) -> ReceivingSide:
        """Return a link of the chain."""
        return _ChainReceiver(context)


class ChainSender(SendingSide):
    """The head of the chain.

    Attributes:
        bytes_served: To all receivers, without headers.
    """

    def __init__(self, context: SenderContext) -> None:
        assert context.host is not None
        self._host, self._ranks = context.host, context.ranks
        memory = torch.empty(context.memory_bytes, dtype=torch.uint8)
        self.buffers = context.buffers_of(memory)
        self._key = secrets.token_bytes(KEY_BYTES)
        self._ring = Ring(self.buffers)
        self._server = Server(context.host, self._key, self._ring)
        self._serial = 0

    @property
    def bytes_served(self) -> int:
        """See the class."""
        return self._server.bytes_served

    def grant(self, rank: int) -> tuple[Grant, list[int]]:
        """See `SendingSide.grant`."""
        host, port = self._server.address
        grant = Member(host, port, self._key.hex(), self._ranks.index(rank))
        return msgspec.structs.asdict(grant), []

    def publish(self, bucket: int, nbytes: int, deadline: Deadline) -> None:
        """See `SendingSide.publish`."""
        self._ring.extend(bucket, self._serial, nbytes)
        self._serial += 1

    def close(self) -> None:
        """See `SendingSide.close`."""
        self._ring.close()
        self._server.close()
        self.buffers = []


class _ChainReceiver(ReceivingSide):
    def __init__(self, context: ReceiverContext) -> None:
        assert context.host is not None
        self._context = context
        self._grant = msgspec.convert(context.grant, Member)
        memory = torch.empty(context.memory_bytes, dtype=torch.uint8)
        self.buffers = context.buffers_of(memory)
        key = bytes.fromhex(self._grant.key)
        self._ring = Ring(self.buffers)
        self._upstream = Upstream(self._grant, key, self._ring)
        self._server = Server(context.host, key, self._ring, self._upstream.pull)
        self._serial = 0
        self._posted: dict[int, int] = {}

    def join(self, deadline: Deadline) -> None:
        host, port = self._server.address
        self._upstream.ask_sender(Register(self._grant.position, host, port), deadline)

    def expect(self, bucket: int, nbytes: int, deadline: Deadline) -> None:
        self._posted[bucket] = self._post(bucket, nbytes)

    def fetch(self, bucket: int, nbytes: int, deadline: Deadline) -> torch.Tensor:
        serial = self._posted.pop(bucket, None)
        if serial is None:
            serial = self._post(bucket, nbytes)
        if nbytes:
            # A limit of its own is the deadline's, whose error names the bucket.
            while self._ring.wait_beyond(bucket, serial, nbytes - 1, ALIVE_S) < nbytes:
                deadline.remaining("bytes of its peer", rank=self._context.rank, bucket=bucket)
        return self.buffers[bucket % len(self.buffers)][:nbytes]

    def release(self, bucket: int) -> None:
        if self._context.device.type == "cuda":
            torch.cuda.current_stream(self._context.device).synchronize()

    def close(self) -> None:
        self._ring.close()
        self._upstream.close()
        self._server.close()
        self._posted.clear()
        self.buffers = []

    def _post(self, bucket: int, nbytes: int) -> int:
        """Start to receive the next bucket; return its serial number."""
        serial = self._serial
        self._serial += 1
        self._upstream.pull(Pull(serial, bucket, 0, nbytes))
        return serial
