"""Memory that processes of one machine share: anonymous on the CPU (`shm`), CUDA IPC on a GPU.

Shared memory on the CPU has no name, so that nothing is left when its last user is gone; it is
passed as a file descriptor.

GPU buffers are exported and opened once per connection. A bucket is announced when the sender's
stream has written it, and acknowledged when the receiver's has read it; no full device
synchronisation. torch keeps exported memory until whoever has opened it releases it, which a killed
receiver never does. So a sender uses the same buffers for all of its connections, one after the
other.
"""

# torch is annotated only in part.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportUnknownVariableType=false

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rl_refit.buffers import split_buffers
from rl_refit.plan import dtype_name, parse_dtype
from rl_refit.protocol.waiting import Deadline
from rl_refit.transports import (
    Grant,
    ReceiverContext,
    ReceivingSide,
    SenderContext,
    SendingSide,
    Transport,
)

# From linux/fcntl.h (5.1), not in Python's fcntl: existing mappings may write, new ones may not.
_F_SEAL_FUTURE_WRITE = 0x0010

# Not Python's own mmap, which keeps a duplicate of the descriptor open for every mapping.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_CUDA_PLAIN = (
    "tensor_offset",
    "storage_device",
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


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
        memory = open_cuda(context.grant["buffers"], context.device)
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


def create_memory(num_bytes: int) -> tuple[int, torch.Tensor]:
    """Return a descriptor of new shared memory, and the memory (`[num_bytes]`, uint8), writable.

    Whoever is passed the descriptor can only map it read-only.
    """
    descriptor = os.memfd_create("rl-refit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        memory = _map(descriptor, num_bytes, 0, mmap.PROT_READ | mmap.PROT_WRITE)
        seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory


def open_memory(descriptor: int, num_bytes: int, *, offset: int = 0) -> torch.Tensor:
    """Return the memory behind a descriptor (`[num_bytes]`, uint8), mapped read-only.

    A write into it ends the process. It is unmapped with its last view.

    Args:
        descriptor: Of `create_memory`; may be closed afterwards.
        num_bytes: How much to map.
        offset: A multiple of the page size.

    Raises:
        ValueError: The memory is smaller.
    """
    size = os.fstat(descriptor).st_size
    if size < offset + num_bytes:
        raise ValueError(f"the shared memory has {size} bytes, {offset + num_bytes} were announced")
    return _map(descriptor, num_bytes, offset, mmap.PROT_READ)


def _map(descriptor: int, num_bytes: int, offset: int, protection: int) -> torch.Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    address = _libc.mmap(None, num_bytes, protection, mmap.MAP_SHARED, descriptor, offset)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {num_bytes} bytes: {os.strerror(number)}")
    buffer = (ctypes.c_ubyte * num_bytes).from_address(address)
    # Not at exit: tensors may still be alive then, and the kernel unmaps everything anyway.
    weakref.finalize(buffer, _libc.munmap, address, num_bytes).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8)


def export_cuda(tensor: torch.Tensor) -> Grant:
    """Return a handle of a GPU tensor. It can be rebuilt once: torch counts its openings."""
    # In the order in which torch's rebuild_cuda_tensor takes them.
    arguments: Any = reduce_tensor(tensor)[1]
    (_, size, stride, offset, _, dtype, device, storage_handle, storage_size) = arguments[:9]
    (storage_offset, _, counter, counter_offset, event, needs_event) = arguments[9:15]
    values = (
        offset,
        device,
        storage_handle,
        storage_size,
        storage_offset,
        counter,
        counter_offset,
        event,
        needs_event,
    )
    plain = dict(zip(_CUDA_PLAIN, values, strict=True))
    place = {"shape": list(size), "stride": list(stride)}
    return {"kind": "cuda", "dtype": dtype_name(dtype), **place, **plain}


def open_cuda(handle: Grant, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the GPU tensor of `export_cuda`, opened in this process.

    Args:
        handle: Of another process.
        device: The device of this process that reads it; None for the one of the owner's number.
    """
    arguments = {name: handle[name] for name in _CUDA_PLAIN}
    if device is not None:
        arguments["storage_device"] = _index_of(torch.device(device))
    return rebuild_cuda_tensor(
        tensor_cls=torch.Tensor,
        tensor_size=torch.Size(handle["shape"]),
        tensor_stride=tuple(handle["stride"]),
        # As torch itself calls it; for an empty tensor the other class takes other arguments.
        storage_cls=torch.storage.TypedStorage,
        dtype=parse_dtype(handle["dtype"]),
        requires_grad=False,
        **arguments,
    )


def _index_of(device: torch.device) -> int:
    index: Any = device.index
    return torch.cuda.current_device() if index is None else index
