"""Handles by which another process opens tensors, and groups of tensors that fit a buffer.

In this older way of refitting, the handles of every tensor pass through the driver, group by group:
a call per group and a handle per tensor. `RefitSender` needs neither.
"""

# torch is annotated only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping

import msgspec
import torch

from rl_refit.plan import dtype_name, parse_dtype
from rl_refit.protocol.waiting import Closing
from rl_refit.transports.shared_memory import (
    CudaHandle,
    create_memory,
    export_cuda,
    open_cuda,
    open_memory,
)

Handle = dict[str, object]
"""Plain values: strings, integers and lists of them; for GPU memory bytes as well."""


class _MemoryHandle(msgspec.Struct, frozen=True, tag_field="kind", tag="memory"):
    """A tensor in shared memory that its owner keeps open.

    Attributes:
        pid: The owner's process.
        descriptor: The open file in that process.
        file: Its device and inode, which identify it.
        offset: Where the tensor begins, in bytes.
        dtype: Name of the dtype.
        shape: Of the tensor.
    """

    pid: int
    descriptor: int
    file: list[int]
    offset: int
    dtype: str
    shape: list[int]


def group_keys(specs: Iterable[tuple[str, int]], limit_bytes: int) -> list[list[str]]:
    """Return the names in groups of at most `limit_bytes`, in their order.

    Args:
        specs: Name and size in bytes of each tensor.
        limit_bytes: Largest size of a group. A larger tensor forms a group of its own.

    >>> group_keys([("a", 4), ("b", 4), ("c", 9), ("d", 1)], 8)
    [['a', 'b'], ['c'], ['d']]
    """
    groups: list[list[str]] = []
    used = 0
    for name, num_bytes in specs:
        if not groups or used + num_bytes > limit_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += num_bytes
    return groups


class HandleOwner(Closing):
    """Keeps the memory behind its handles alive until it is closed.

    On a GPU a handle refers to the tensor's own memory. On the CPU the tensors are copied into
    shared memory, which processes of the same user on the same machine can open read-only.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._tensors: list[torch.Tensor] = []

    def export(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Handle]:
        """Return a handle for each tensor."""
        on_gpu = {name: t.detach() for name, t in tensors.items() if t.is_cuda}
        elsewhere = {name: t.detach() for name, t in tensors.items() if not t.is_cuda}
        self._tensors += on_gpu.values()
        handles: dict[str, CudaHandle | _MemoryHandle] = {
            name: export_cuda(tensor) for name, tensor in on_gpu.items()
        }
        if elsewhere:
            handles |= self._copy(elsewhere)
        return {
            name: msgspec.to_builtins(handles[name], builtin_types=(bytes,)) for name in tensors
        }

    def close(self) -> None:
        """Release all memory. On the CPU, tensors opened in another process stay valid there."""
        self._tensors.clear()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, _MemoryHandle]:
        offsets: dict[str, int] = {}
        end = 0
        for name, tensor in tensors.items():
            offsets[name] = end
            # A mapping's offset must be a multiple of the page size.
            end += -(-tensor.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        # One file for all of the call's tensors: descriptors are scarcer than memory.
        descriptor, memory = create_memory(end)
        self._descriptors.append(descriptor)
        status = os.fstat(descriptor)
        for name, tensor in tensors.items():
            place = memory[offsets[name] : offsets[name] + tensor.nbytes]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return {
            name: _MemoryHandle(
                pid=os.getpid(),
                descriptor=descriptor,
                file=[status.st_dev, status.st_ino],
                offset=offsets[name],
                dtype=dtype_name(tensor.dtype),
                shape=list(tensor.shape),
            )
            for name, tensor in tensors.items()
        }


def rebuild(handle: Handle, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the tensor of a handle, without a copy.

    On the CPU it is in read-only memory: a write into it ends the process.

    Args:
        handle: Of `HandleOwner.export`.
        device: For GPU memory, this process's name of the GPU; None for the one with the owner's
            index, which is another GPU if the two processes see different ones.

    Raises:
        RuntimeError: Its owner has closed it, has ended, or is not reachable from this process.
        msgspec.ValidationError: It is not a handle.
    """
    opened = msgspec.convert(handle, CudaHandle | _MemoryHandle)
    if isinstance(opened, CudaHandle):
        return open_cuda(opened, device)
    dtype = parse_dtype(opened.dtype)
    size = torch.Size(opened.shape).numel() * dtype.itemsize
    return _open(opened, size).view(dtype).view(opened.shape)


def _open(handle: _MemoryHandle, size: int) -> torch.Tensor:
    path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
    subject = f"the memory of process {handle.pid} cannot be opened"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(
            f"{subject}: {error}. Its owner has closed it, or it is of another user or another "
            "process namespace"
        ) from error
    try:
        # The owner may have closed the memory and opened another file under the same number.
        status = os.fstat(descriptor)
        if [status.st_dev, status.st_ino] != handle.file:
            raise RuntimeError(f"{subject}: its owner has closed it")
        return open_memory(descriptor, size, offset=handle.offset)
    finally:
        os.close(descriptor)
