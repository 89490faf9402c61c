"""The transports within one machine: anonymous shared memory (`shm`) and CUDA IPC (`cuda_ipc`).

Shared memory on the CPU has no name and is passed as a file descriptor, so that the kernel frees it
with its last user.

GPU buffers are exported and opened once per connection. A bucket is announced when the sender's
stream has written it, and acknowledged when the receiver's stream has read it, without a
synchronisation of the device. torch frees exported memory only when its reader has released it,
which a killed receiver never does: so a sender uses one set of buffers for all of its connections.
It counts readers in a file of `/dev/shm`, which stays behind where a sender is killed: the
receivers remove it then.
"""

# torch is annotated only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import fcntl
import inspect
import mmap
import os
import re
import weakref
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rl_refit.plan import dtype_name, parse_dtype
from rl_refit.protocol.waiting import Deadline
from rl_refit.transports import (
    Grant,
    ReceiverContext,
    ReceivingSide,
    SenderContext,
    SendingSide,
    Transport,
    expandable_segments,
)

# From linux/fcntl.h (5.1), not in Python's fcntl: existing mappings may write, new ones may not.
_F_SEAL_FUTURE_WRITE = 0x0010

# What torch calls the shared memory in which it counts readers.
_COUNTERS = re.compile(r"/torch_(\d+)_\d+_\d+")

# Not Python's own mmap, which keeps a duplicate of the descriptor open for every mapping.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class ShmTransport(Transport):
    """All receivers map the same memory, read-only."""

    survives_loss = True

    def open_sender(self, context: SenderContext) -> SendingSide:
        """Return newly created shared memory."""
        return _ShmSender(context)

    def open_receiver(self, context: ReceiverContext) -> ReceivingSide:
        """Return the sender's memory, mapped into this process."""
        return _ShmReceiver(context)


class _ShmSender(SendingSide):
    def __init__(self, context: SenderContext) -> None:
        self._descriptor, memory = create_memory(context.memory_bytes)
        self.buffers = context.buffers_of(memory)

    def grant(self, rank: int) -> tuple[Grant, list[int]]:
        return {}, [self._descriptor]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self.buffers = []


class _SharedReceiver(ReceivingSide):
    """Reads the sender's own buffers."""

    def fetch(self, bucket: int, nbytes: int, deadline: Deadline) -> torch.Tensor:
        return self.buffers[bucket % len(self.buffers)][:nbytes]

    def close(self) -> None:
        self.buffers = []


class _ShmReceiver(_SharedReceiver):
    def __init__(self, context: ReceiverContext) -> None:
        (descriptor,) = context.descriptors
        try:
            memory = open_memory(descriptor, context.memory_bytes)
        finally:
            os.close(descriptor)
        self.buffers = context.buffers_of(memory)


class CudaIpcTransport(Transport):
    """Receivers read the sender's GPU memory; they must see the same GPU, or a peer of it.

    Raises:
        ValueError: The environment makes torch allocate memory that it does not export.
    """

    survives_loss = True

    def __init__(self) -> None:
        if (setting := expandable_segments(os.environ)) is not None:
            raise ValueError(
                f"{setting} in the environment: transport='cuda_ipc' needs memory of fixed "
                "segments, unset it or use transport='shm'"
            )
        self._memory: torch.Tensor | None = None
        self._counters: set[str] = set()

    def open_sender(self, context: SenderContext) -> SendingSide:
        """Return buffers on the sender's GPU."""
        _require_cuda(context.device)
        size = max(context.memory_bytes, 1)
        if self._memory is None or len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=context.device)
        return _CudaIpcSender(context, self._memory)

    def open_receiver(self, context: ReceiverContext) -> ReceivingSide:
        """Return the sender's buffers, opened in this process."""
        _require_cuda(context.device)
        handle = msgspec.convert(context.grant["buffers"], CudaHandle)
        self._remove_counters()
        if handle.ref_counter_handle is not None:
            self._counters.add(handle.ref_counter_handle.decode())
        return _CudaIpcReceiver(context, handle)

    def close(self) -> None:
        """Release the sender's buffers."""
        self._remove_counters()
        if self._memory is not None:
            self._memory = None
            # torch removes the file of its counters here, if all receivers have closed.
            torch.cuda.ipc_collect()

    def _remove_counters(self) -> None:
        self._counters -= remove_orphans(self._counters)


def _require_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f'transport="cuda_ipc" needs a CUDA device, not {device}')


def remove_orphans(names: Iterable[str]) -> set[str]:
    """Remove the files in which processes that have ended counted the readers of GPU memory.

    Args:
        names: As torch gives them to shared memory, `/torch_PID_NUMBER_NUMBER`. Others are left
            alone: they come from another process.

    Returns:
        Those that were removed.
    """
    found = {name: _COUNTERS.fullmatch(name) for name in names}
    orphans = {name for name, own in found.items() if own and not Path("/proc", own[1]).exists()}
    for name in orphans:
        Path(f"/dev/shm{name}").unlink(missing_ok=True)
    return orphans


class _CudaIpcSender(SendingSide):
    digest = "keyed_sum"

    def __init__(self, context: SenderContext, memory: torch.Tensor) -> None:
        self._memory: torch.Tensor | None = memory
        self.buffers = context.buffers_of(memory)
        self._written = torch.cuda.Event()
        self._device = context.device

    def grant(self, rank: int) -> tuple[Grant, list[int]]:
        # An export can be opened once, as torch counts its readers: one for every receiver.
        assert self._memory is not None
        return {
            "buffers": msgspec.to_builtins(export_cuda(self._memory), builtin_types=(bytes,))
        }, []

    def publish(self, bucket: int, nbytes: int, deadline: Deadline) -> None:
        self._written.record(torch.cuda.current_stream(self._device))
        self._written.synchronize()

    def close(self) -> None:
        self.buffers = []
        self._memory = None


class _CudaIpcReceiver(_SharedReceiver):
    def __init__(self, context: ReceiverContext, handle: CudaHandle) -> None:
        memory = open_cuda(handle, context.device)
        self.buffers = context.buffers_of(memory)
        self._device = context.device
        self._read = torch.cuda.Event()

    def release(self, bucket: int) -> None:
        self._read.record(torch.cuda.current_stream(self._device))
        self._read.synchronize()


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


class CudaHandle(msgspec.Struct, frozen=True, tag_field="kind", tag="cuda"):
    """What `torch.multiprocessing` needs to open a GPU tensor; None where the tensor is empty.

    The attributes from `tensor_offset` on are arguments of torch's `rebuild_cuda_tensor`.
    """

    dtype: str
    shape: list[int]
    stride: list[int]
    tensor_offset: int
    storage_device: int
    storage_handle: bytes | None
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes | None
    ref_counter_offset: int
    event_handle: bytes | None
    event_sync_required: bool | None


def export_cuda(tensor: torch.Tensor) -> CudaHandle:
    """Return a handle of a GPU tensor. It can be opened once: torch counts its readers."""
    arguments = reduce_tensor(tensor)[1]
    by_name = inspect.signature(rebuild_cuda_tensor).bind(*arguments).arguments
    values = {
        **by_name,
        "dtype": dtype_name(by_name["dtype"]),
        "shape": list(by_name["tensor_size"]),
        "stride": list(by_name["tensor_stride"]),
    }
    return msgspec.convert(values, CudaHandle)


def open_cuda(handle: CudaHandle, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the GPU tensor of `export_cuda`, opened in this process.

    Args:
        handle: Of another process.
        device: This process's name of the GPU; None for the one with the owner's index.
    """
    arguments = msgspec.structs.asdict(handle)
    dtype, shape, stride = (arguments.pop(name) for name in ("dtype", "shape", "stride"))
    if device is not None:
        arguments["storage_device"] = _index_of(torch.device(device))
    return rebuild_cuda_tensor(
        tensor_cls=torch.Tensor,
        tensor_size=torch.Size(shape),
        tensor_stride=tuple(stride),
        # As torch itself calls it; for an empty tensor the other class takes other arguments.
        storage_cls=torch.storage.TypedStorage,
        dtype=parse_dtype(dtype),
        requires_grad=False,
        **arguments,
    )


def _index_of(device: torch.device) -> int:
    # torch annotates `index` as int; it is None in `torch.device("cuda")`.
    if device.index is None:  # pyright: ignore[reportUnnecessaryComparison]
        return torch.cuda.current_device()
    return device.index
