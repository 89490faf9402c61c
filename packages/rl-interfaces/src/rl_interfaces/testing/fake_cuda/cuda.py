"""`fake_cuda`: the context in which a process is one rank of a job on devices that do nothing."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._dynamo  # both ask for CUDA while they are imported, and must find none
import torch._inductor.utils

from rl_interfaces.backend.fake.device import FakeDevice
from rl_interfaces.backend.fake.patches import one_rank, replaced
from rl_interfaces.testing.fake_cuda import guard
from rl_interfaces.testing.fake_cuda.torch_cuda import Stream, surface


@contextmanager
def fake_cuda(
    *, rank: int = 0, world_size: int = 1, packages: Sequence[str] = ("rl_",)
) -> Generator[FakeDevice, None, None]:
    """Be one rank of a job on CUDA devices that compute nothing, in groups that send nothing.

    The process has loaded the backend of `guard.py` before torch. Inside, `torch.cuda` is
    available, torchrun's environment variables are set, and the default process group exists.

    Args:
        rank: The rank that this process is.
        world_size: The ranks of the job; the other ones do not exist.
        packages: See `FakeDevice`.

    Yields:
        The counters, see `FakeDevice.phase`.

    Raises:
        RuntimeError: The process has not loaded the backend.
    """
    if not guard.is_loaded():
        raise RuntimeError(
            "the fake CUDA device is not loaded: call load() before torch is imported, or start "
            "the process by run_on_fake_cuda()"
        )
    device = FakeDevice(packages=packages)
    with ExitStack() as leaving:
        leaving.enter_context(one_rank(device, rank=rank, world_size=world_size))
        leaving.enter_context(_torch_cuda(device))
        # `torch.tensor(..., device="cuda")` then is a copy from the host, which the mode sees.
        torch._C._set_only_lift_cpu_tensors(True)
        leaving.callback(torch._C._set_only_lift_cpu_tensors, False)
        leaving.enter_context(device)
        yield device


def _torch_cuda(device: FakeDevice) -> Any:
    stand_ins = surface(device)
    replacements = [(torch.cuda, name, value) for name, value in stand_ins.items()]
    random = [
        (torch.cuda.random, name, stand_ins[name]) for name in ("get_rng_state", "set_rng_state")
    ]
    # In C++, where it would take a `torch.cuda.Event` of this kit for one of its own.
    stream = (torch.accelerator, "current_stream", Stream)
    return replaced(*replacements, *random, stream)
