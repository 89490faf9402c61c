"""A device that computes nothing: what a worker would allocate and launch, seen without running it.

`fake_cpu` is for a program that asks how much memory a worker takes, on any build of torch;
`rl_interfaces.testing.fake_cuda` is for tests of what a worker does on CUDA.
"""

from rl_interfaces.backend.fake.cpu import fake_cpu
from rl_interfaces.backend.fake.device import FakeDevice, Figures, computes_values

__all__ = ["FakeDevice", "Figures", "computes_values", "fake_cpu"]
