"""GPU memory shared between processes of one machine.

The buffers are exported and opened once per connection. A bucket is announced when the sender's
stream has written it, and acknowledged when the receiver's has read it; no full device
synchronisation.

torch keeps exported memory until whoever has opened it releases it, which a killed receiver never
does. So a sender uses the same buffers for all of its connections, one after the other.
"""

# torch is annotated only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import torch

from rl_refit.buffers import split_buffers
from rl_refit.compat.handles import export_cuda, rebuild
from rl_refit.protocol.waiting import Deadline
from rl_refit.transports.base import (
    Grant,
    ReceiverContext,
    ReceivingSide,
    SenderContext,
    SendingSide,
    Transport,
)


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
        """Release the sender's buffers."""
        self._memory = None


class _CudaIpcSender(SendingSide):
    digest = "keyed_sum"

    def __init__(self, context: SenderContext, memory: torch.Tensor) -> None:
        self._memory: torch.Tensor | None = memory
        self.buffers = split_buffers(memory, context.num_buffers, context.buffer_bytes)
        self._written = torch.cuda.Event()
        self._device = context.device

    def grant(self, rank: int) -> tuple[Grant, list[int]]:
        # torch counts each export until its reader releases it, so every receiver needs its own.
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
