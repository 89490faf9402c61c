"""Anonymous shared memory: it has no name, so nothing is left when its last user is gone."""

# torch and mmap are annotated only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import fcntl
import mmap
import os
import warnings

import torch

# From linux/fcntl.h (5.1): existing mappings may write, new ones may not.
_F_SEAL_FUTURE_WRITE = 0x0010


def create_memory(num_bytes: int) -> tuple[int, torch.Tensor]:
    """Return a descriptor of new shared memory, and the memory (`[num_bytes]`, uint8), writable.

    Whoever gets the descriptor can only read.
    """
    descriptor = os.memfd_create("rl-refit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, max(num_bytes, 1))
        mapped = mmap.mmap(descriptor, max(num_bytes, 1))
        seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes]


def open_memory(descriptor: int, num_bytes: int, *, offset: int = 0) -> torch.Tensor:
    """Return the memory behind a descriptor (`[num_bytes]`, uint8), from whole pages on.

    It is mapped read-only: a write into it ends the process. It is unmapped with its last view.

    Raises:
        ValueError: The memory is smaller.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    size = os.fstat(descriptor).st_size
    if size < offset + num_bytes:
        raise ValueError(f"the shared memory has {size} bytes, {offset + num_bytes} were announced")
    mapped = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ, offset=offset)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.frombuffer(mapped, dtype=torch.uint8)
