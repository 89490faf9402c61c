"""GPU memory shared between processes of one machine.

The buffers are exported once per connection, and opened once. A bucket is announced when the
sender's stream has written it, and acknowledged when the receiver's has read it; no device is
synchronised as a whole.

Torch keeps memory until whoever has opened it gives it back, which a killed receiver never does. So
a sender has the same buffers for all of its connections, one after the other.
"""

# torch is annotated only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import torch

from rl_refit.deadline import Deadline
from rl_refit.handles import export_cuda, rebuild
from rl_refit.transports.base import (
    ReceiverContext,
    ReceivingSide,
    SenderContext,
    SendingSide,
    Transport,
)
from rl_refit.transports.shm import split_buffers


class CudaIpcTransport(Transport):
    """Receivers read the sender's GPU memory; they must see the same GPU, or a peer of it."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def open_sender(self, context: SenderContext) -> SendingSide:
        """Return buffers on the sender's GPU."""
        if context.device.type != "cuda":
            raise ValueError(f'transport="cuda_ipc" needs a CUDA device, not {context.device}')
        size = max(context.num_buffers * context.buffer_bytes, 1)
        if self._memory is None or len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=context.device)
        return _CudaIpcSender(context, self._memory)

    def open_receiver(self, context: ReceiverContext) -> ReceivingSide:
        """Return the sender's buffers, opened in this process."""
        if context.device.type != "cuda":
            raise ValueError(f'transport="cuda_ipc" needs a CUDA device, not {context.device}')
        return _CudaIpcReceiver(context)

    def close(self) -> None:
        """Let go of the sender's buffers."""
        self._memory = None


class _CudaIpcSender(SendingSide):
    digest = "keyed_sum"

    def __init__(self, context: SenderContext, memory: torch.Tensor) -> None:
        self._memory: torch.Tensor | None = memory
        self.buffers = split_buffers(memory, context.num_buffers, context.buffer_bytes)
        self._written = torch.cuda.Event()
        self._device = context.device

    def grant(self, rank: int) -> tuple[dict[str, Any], list[int]]:
        # An export is counted, and given back by the one who opened it: one for each receiver.
        assert self._memory is not None
        return {"buffers": export_cuda(self._memory)}, []

    def publish(self, bucket: int, nbytes: int, deadline: Deadline) -> None:
        self._written.record(torch.cuda.current_stream(self._device))
        self._written.synchronize()

    def close(self) -> None:
        self.buffers = []
        self._memory = None


class _CudaIpcReceiver(ReceivingSide):
    def __init__(self, context: ReceiverContext) -> None:
        memory = rebuild(context.grant["buffers"], context.device)
        self.buffers = split_buffers(memory, context.num_buffers, context.buffer_bytes)
        self._device = context.device
        self._read = torch.cuda.Event()

    def fetch(self, bucket: int, nbytes: int, deadline: Deadline) -> torch.Tensor:
        return self.buffers[bucket % len(self.buffers)][:nbytes]

    def release(self, bucket: int) -> None:
        self._read.record(torch.cuda.current_stream(self._device))
        self._read.synchronize()

    def close(self) -> None:
        self.buffers = []
