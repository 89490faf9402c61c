"""What a worker can tell about its device, and the profiling ranges on it."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rl_interfaces.backend.runtime.ranks import RankEnvironment

_MIB = 1024 * 1024
_REPORTED_VARIABLES = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def device_id(device: torch.device) -> str:
    """Return the GPU's UUID, or on the CPU an id of this host that stays the same."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    machine = Path("/etc/machine-id")
    identity = machine.read_text().strip() if machine.is_file() else ""
    digest = hashlib.sha256(f"{identity}:{socket.gethostname()}".encode()).hexdigest()
    return f"CPU-{digest[:32]}"


def describe_device(environment: RankEnvironment) -> dict[str, Any]:
    """Return the figures of `get_gpu_info`; memory is in MiB, and zero on the CPU."""
    device = environment.device
    on_cuda = device.type == "cuda"
    memory = {
        "memory_allocated_mb": torch.cuda.memory_allocated,
        "memory_reserved_mb": torch.cuda.memory_reserved,
        "peak_memory_allocated_mb": torch.cuda.max_memory_allocated,
        "peak_memory_reserved_mb": torch.cuda.max_memory_reserved,
    }
    return {
        "rank": environment.rank,
        "world_size": environment.world_size,
        "local_rank": environment.local_rank,
        "local_device_id": device.index if on_cuda else None,
        "global_device_id": device_id(device),
        "device_count": torch.cuda.device_count(),
        "device_name": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        **{key: read(device) / _MIB if on_cuda else 0.0 for key, read in memory.items()},
        "env_vars": {name: os.environ.get(name) for name in _REPORTED_VARIABLES},
    }


class Profiler:
    """A profiling range: CUDA's own on a GPU, a trace of `torch.profiler` on the CPU."""

    def __init__(self, environment: RankEnvironment, *, directory: str) -> None:
        self._environment = environment
        self._directory = Path(directory)
        self._profile: torch.profiler.profile | None = None
        self._num_traces = 0
        self._running = False

    def start(self) -> None:
        """Open the range.

        Raises:
            RuntimeError: One is open.
        """
        if self._running:
            raise RuntimeError("a profiling range is open: call stop_gpu_profiling() first")
        self._running = True
        if self._environment.device.type == "cuda":
            torch.cuda.profiler.start()
            torch.cuda.nvtx.range_push("policy")
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def stop(self) -> None:
        """Close the range; on the CPU, write `DIRECTORY/rank_R_N.json`, a Chrome trace.

        Raises:
            RuntimeError: None is open.
        """
        if not self._running:
            raise RuntimeError("no profiling range is open: call start_gpu_profiling() first")
        self._running = False
        if self._profile is None:
            torch.cuda.nvtx.range_pop()
            torch.cuda.profiler.stop()
            return
        self._profile.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"rank_{self._environment.rank}_{self._num_traces}.json"
        self._profile.export_chrome_trace(str(self._directory / name))
        self._num_traces += 1
        self._profile = None
