"""Shared memory between processes of one machine, passed as a file descriptor."""

from __future__ import annotations

import os

import torch

from rl_refit.buffers import split_buffers
from rl_refit.protocol.waiting import Deadline
from rl_refit.transports.base import (
    Grant,
    ReceiverContext,
    ReceivingSide,
    SenderContext,
    SendingSide,
    Transport,
)
from rl_refit.transports.memory import create_memory, open_memory


class ShmTransport(Transport):
    """All receivers map the same memory, read-only."""

    def open_sender(self, context: SenderContext) -> SendingSide:
        """Return newly created shared memory."""
        return _ShmSender(context)

    def open_receiver(self, context: ReceiverContext) -> ReceivingSide:
        """Return the sender's memory, mapped into this process."""
        return _ShmReceiver(context)


class _ShmSender(SendingSide):
    def __init__(self, context: SenderContext) -> None:
        self._descriptor, memory = create_memory(context.num_buffers * context.buffer_bytes)
        self.buffers = split_buffers(memory, context.num_buffers, context.buffer_bytes)

    def grant(self, rank: int) -> tuple[Grant, list[int]]:
        return {}, [self._descriptor]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self.buffers = []


class _ShmReceiver(ReceivingSide):
    def __init__(self, context: ReceiverContext) -> None:
        (descriptor,) = context.descriptors
        try:
            memory = open_memory(descriptor, context.num_buffers * context.buffer_bytes)
        finally:
            os.close(descriptor)
        self.buffers = split_buffers(memory, context.num_buffers, context.buffer_bytes)

    def fetch(self, bucket: int, nbytes: int, deadline: Deadline) -> torch.Tensor:
        return self.buffers[bucket % len(self.buffers)][:nbytes]

    def close(self) -> None:
        self.buffers = []
