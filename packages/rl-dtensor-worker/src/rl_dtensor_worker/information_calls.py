"""The calls that tell about a worker: its device, its memory, a profile."""

from __future__ import annotations

from typing import Any

import torch

from rl_dtensor_worker import device
from rl_dtensor_worker.fsdp import local_tensor
from rl_dtensor_worker.worker_parts import WorkerParts


class InformationCalls(WorkerParts):
    """What may be asked in any state."""

    def is_alive(self) -> bool:
        """Return True."""
        return True

    def reset_peak_memory_stats(self) -> None:
        """Start the peak memory figures anew."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def get_gpu_info(self) -> dict[str, Any]:
        """Return rank, device, memory figures in MiB, and a few values of one parameter."""
        name, parameter = next(iter(self.model.named_parameters()))
        sample = local_tensor(parameter).flatten()[:4].tolist()
        return {**device.describe_device(self._environment), "parameter_sample": {name: sample}}

    def report_device_id(self) -> str:
        """Return the GPU's UUID, or on the CPU an id of the host."""
        return device.device_id(self._device)

    def start_gpu_profiling(self) -> None:
        """Open a profiling range: CUDA's own, or on the CPU a trace of `torch.profiler`."""
        self._profiler.start()

    def stop_gpu_profiling(self) -> None:
        """Close the range; on the CPU the trace is written to `policy.profile_dir`."""
        self._profiler.stop()
