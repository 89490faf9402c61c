"""A CUDA device that computes nothing: what a worker would do on GPUs, seen on a CPU.

Host tensors are real, CUDA tensors are FakeTensors, process groups send nothing. A process that has
loaded the no-op backend before torch runs a worker as one rank of any number of GPUs, and counts
what it would do there. That detects

- operators, lists of tensors and collectives that mix devices,
- what stays on the device after an offload,
- lines at which the host waits for the device,
- the number of kernel launches,
- the bytes that are allocated at one time.

It does not detect wrong numbers, races between streams, nor what NCCL, a kernel or the driver
refuses. Unknown floats count as 0 on the host, so that a model's own branches on its values take
one way only.

A test starts a process of its own, since a process that has imported torch cannot load the backend:

    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    figures = run_on_fake_cuda("my_cases:measure", layout="tp2", path=[tests_folder])

and `measure` runs there, with `fake_cuda` as its context:

    def measure(layout):
        with fake_cuda(rank=0, world_size=2) as device:
            worker = MyWorker(...)
            phases = run_life(device, worker, batch=batch, prompts=prompts, loss=loss)
        return {name: figures.peak_bytes for name, figures in phases.items()}

`FakeDevice.phase` is the counter for everything else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_interfaces.backend.fake.device import FakeDevice, Figures, Sync
    from rl_interfaces.testing.fake_cuda.cuda import fake_cuda
    from rl_interfaces.testing.fake_cuda.guard import load, why_unavailable
    from rl_interfaces.testing.fake_cuda.life import run_life
    from rl_interfaces.testing.fake_cuda.limits import (
        MeasuredLife,
        Numbers,
        exceeded,
        measured_life,
        problems,
        read_limits,
    )
    from rl_interfaces.testing.fake_cuda.process import run_on_fake_cuda

# Loaded when they are asked for: `load` has to run before anything imports torch.
_HOMES = {
    f"{__name__}.cuda": ("fake_cuda",),
    "rl_interfaces.backend.fake.device": ("FakeDevice", "Figures", "Sync"),
    f"{__name__}.guard": ("load", "why_unavailable"),
    f"{__name__}.life": ("run_life",),
    f"{__name__}.limits": (
        "MeasuredLife",
        "Numbers",
        "exceeded",
        "measured_life",
        "problems",
        "read_limits",
    ),
    f"{__name__}.process": ("run_on_fake_cuda",),
}

__all__ = [
    "FakeDevice",
    "Figures",
    "MeasuredLife",
    "Numbers",
    "Sync",
    "exceeded",
    "fake_cuda",
    "load",
    "measured_life",
    "problems",
    "read_limits",
    "run_life",
    "run_on_fake_cuda",
    "why_unavailable",
]


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
