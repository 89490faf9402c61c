"""The calls that tell about a worker: its device, its memory, a profile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from rl_interfaces.backend.runtime.device import Profiler, describe_device, device_id
from rl_interfaces.backend.runtime.ranks import RankEnvironment


class InformationCalls(ABC):
    """What may be asked of a worker in any state."""

    _environment: RankEnvironment
    _profiler: Profiler

    @abstractmethod
    def _sample_parameter(self) -> tuple[str, torch.Tensor]:
        """Return a parameter's name, and this rank's part of it."""

    def is_alive(self) -> bool:
        """Return True."""
        return True

    def reset_peak_memory_stats(self) -> None:
        """Start the peak memory figures anew."""
        if self._environment.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._environment.device)

    def get_gpu_info(self) -> dict[str, Any]:
        """Return rank, device, memory figures in MiB, and a few values of one parameter."""
        name, parameter = self._sample_parameter()
        sample: list[float] = parameter.detach().flatten()[:4].tolist()
        return {**describe_device(self._environment), "parameter_sample": {name: sample}}

    def report_device_id(self) -> str:
        """Return the GPU's UUID, or on the CPU an id of the host."""
        return device_id(self._environment.device)

    def start_gpu_profiling(self) -> None:
        """Open a profiling range: CUDA's own, or on the CPU a trace of `torch.profiler`."""
        self._profiler.start()

    def stop_gpu_profiling(self) -> None:
        """Close the range; on the CPU the trace is written to `policy.profile_dir`."""
        self._profiler.stop()
