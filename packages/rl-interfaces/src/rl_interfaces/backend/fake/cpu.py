"""`fake_cpu`: the context in which a process is one rank of a job that allocates nothing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from rl_interfaces.backend.fake.device import FakeDevice
from rl_interfaces.backend.fake.patches import one_rank


@contextmanager
def fake_cpu(
    *, rank: int = 0, world_size: int = 1, has_cuda_kernels: bool = False
) -> Generator[FakeDevice, None, None]:
    """Be one rank of a job on the CPU that allocates and sends nothing.

    Any build of torch does, as long as it finds no GPU: set `CUDA_VISIBLE_DEVICES` to an empty
    string before torch is imported. Torch is changed inside, so that the process should be one of
    its own.

    Args:
        rank: The rank that this process is.
        world_size: The ranks of the job; the other ones do not exist.
        has_cuda_kernels: Whether attention takes the kernels that CUDA would choose, which decide
            what it keeps for the backward pass, and collectives take what NCCL's do.

    Yields:
        The counters, see `FakeDevice.phase`.

    Raises:
        RuntimeError: There is a GPU, which workers would take for their device.
    """
    if torch.cuda.is_available():
        raise RuntimeError("torch finds a GPU: set CUDA_VISIBLE_DEVICES='' before it is imported")
    device = FakeDevice(device_type="cpu", has_cuda_kernels=has_cuda_kernels)
    with one_rank(device, rank=rank, world_size=world_size), device:
        yield device
