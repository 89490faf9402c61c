"""Tensors that another process opens by a handle, and groups of them that fit a buffer.

In this older way of refit the handles of every tensor go through the driver, group by group. It
costs a call per group and a handle per tensor; `RefitSender` needs neither.
"""

# torch is annotated only in part.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportUnknownVariableType=false

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rl_refit.plan import dtype_name, parse_dtype
from rl_refit.protocol.waiting import Closing
from rl_refit.transports.shared_memory import (
    create_memory,
    export_cuda,
    open_cuda,
    open_memory,
)

Handle = dict[str, Any]
"""Plain values: strings, integers and lists of them; for GPU memory bytes as well."""


def group_keys(specs: Iterable[tuple[str, int]], limit_bytes: int) -> list[list[str]]:
    """Return the names in groups of at most `limit_bytes`, in their order.

    Args:
        specs: Name and bytes of each tensor.
        limit_bytes: Largest size of a group. A larger tensor is a group of its own.

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

    On a GPU a handle names the tensor's own memory. On the CPU the tensors are copied into shared
    memory, which processes of the same user on the same machine can open read-only.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._tensors: list[torch.Tensor] = []

    def export(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Handle]:
        """Return a handle for each tensor."""
        on_gpu = {name: t.detach() for name, t in tensors.items() if t.is_cuda}
        elsewhere = {name: t.detach() for name, t in tensors.items() if not t.is_cuda}
        self._tensors += on_gpu.values()
        handles = {name: export_cuda(tensor) for name, tensor in on_gpu.items()}
        if elsewhere:
            handles |= self._copy(elsewhere)
        return {name: handles[name] for name in tensors}

    def close(self) -> None:
        """Release everything. On the CPU, what another process has opened stays valid there."""
        self._tensors.clear()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Handle]:
        offsets: dict[str, int] = {}
        end = 0
        for name, tensor in tensors.items():
            offsets[name] = end
            # Mappings begin at page boundaries.
            end += -(-tensor.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        descriptor, memory = create_memory(end)
        self._descriptors.append(descriptor)
        status = os.fstat(descriptor)
        for name, tensor in tensors.items():
            place = memory[offsets[name] : offsets[name] + tensor.nbytes]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return {
            name: {
                "kind": "memory",
                "pid": os.getpid(),
                "descriptor": descriptor,
                "file": [status.st_dev, status.st_ino],
                "offset": offsets[name],
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
            }
            for name, tensor in tensors.items()
        }


def rebuild(handle: Handle, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the tensor of a handle, without a copy.

    On the CPU it is in read-only memory: a write into it ends the process.

    Args:
        handle: Of `HandleOwner.export`.
        device: For GPU memory, the device of this process that reads it; None for the one of the
            owner's number, which is another GPU where the two processes see different ones.

    Raises:
        RuntimeError: Its owner has closed it, has ended, or is not reachable from this process.
    """
    if handle["kind"] == "cuda":
        return open_cuda(handle, device)
    dtype, shape = parse_dtype(handle["dtype"]), list(handle["shape"])
    size = torch.Size(shape).numel() * dtype.itemsize
    return _open(handle, size).view(dtype).view(shape)


def _open(handle: Handle, size: int) -> torch.Tensor:
    path = f"/proc/{handle['pid']}/fd/{handle['descriptor']}"
    subject = f"the memory of process {handle['pid']} cannot be opened"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(
            f"{subject}: {error}. Its owner has closed it, or it is of another user or another "
            "process namespace"
        ) from error
    try:
        # The number may name another file by now: the owner closes and opens files.
        status = os.fstat(descriptor)
        if [status.st_dev, status.st_ino] != list(handle["file"]):
            raise RuntimeError(f"{subject}: its owner has closed it")
        return open_memory(descriptor, size, offset=handle["offset"])
    finally:
        os.close(descriptor)
