"""Anonymous shared memory: it has no name, so that nothing is left when its last user is gone."""

# torch is annotated only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

import torch

# From linux/fcntl.h (5.1), not in Python's fcntl: existing mappings may write, new ones may not.
_F_SEAL_FUTURE_WRITE = 0x0010

# Not Python's own mmap, which keeps a duplicate of the descriptor open for every mapping.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


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
