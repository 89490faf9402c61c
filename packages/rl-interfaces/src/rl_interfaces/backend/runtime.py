"""The process of one rank: its place in the job, process groups, device, ports, random state."""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """One rank as torchrun's environment variables describe it."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @classmethod
    def from_environment(cls) -> RankEnvironment:
        """Read the variables; the device is this rank's GPU, or the CPU where there is none.

        Raises:
            RuntimeError: A variable is missing.
        """
        missing = [name for name in _RANK_VARIABLES if name not in os.environ]
        if missing:
            raise RuntimeError(
                f"the environment variables {missing} are not set: start the worker under "
                "torchrun, rl-policy, or set them before it is constructed"
            )
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        else:
            device = torch.device("cpu")
        return cls(
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            local_rank=local_rank,
            device=device,
        )


def init_process_group(environment: RankEnvironment, *, timeout_s: float) -> bool:
    """Join the default process group; False when the caller had already joined it.

    On CUDA the group carries CPU tensors over gloo too, for offloaded parameters.
    """
    if dist.is_initialized():
        return False
    on_cuda = environment.device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(environment.device)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        timeout=timedelta(seconds=timeout_s),
    )
    return True


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """End groups that this rank is in, but not the default one, which may be another's.

    Each group has threads and sockets, which go with it. Not collective.
    """
    if not dist.is_initialized():
        return  # they ended with the default group
    for group in dict.fromkeys(groups):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


_MAX_BYTES = 1024

Result = TypeVar("Result")


@contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Generator[None, None, None]:
    """Run the body on every rank; what it raises on any is raised on all. Collective.

    The body itself may only call collectives if it fails on all ranks alike.

    Raises:
        RuntimeError: The body raised on other ranks, and not on this one.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failures = _share(f"{type(error).__name__}: {error}" if error is not None else "", group)
    if error is not None:
        raise error
    for rank, text in enumerate(failures):
        if text:
            raise RuntimeError(f"rank {rank} failed: {text}")


def first_rank_first(function: Callable[[], Result]) -> Result:
    """Return `function()` of this rank; the first rank calls it before all others. Collective.

    For what leaves files behind that the others find.
    """
    with failing_together():
        result = function() if dist.get_rank() == 0 else None
    with failing_together():
        return function() if result is None else result


def _share(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Return every rank's text, as much of it as fits."""
    on_cpu = "cpu:" in str(dist.get_backend_config(group))
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    encoded = text.encode()[:_MAX_BYTES]
    own = torch.zeros(_MAX_BYTES, dtype=torch.uint8)
    own[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    texts = [
        torch.empty(_MAX_BYTES, dtype=torch.uint8, device=device)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(texts, own.to(device), group=group)
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in texts]


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


class ReservedPort:
    """A TCP port of this machine that the system gives to nobody else while this object is open.

    A port that was free a moment ago can be another process's when the listener comes. Here a
    socket stays bound to it, and never listens. Who knows the number can listen on it with
    `SO_REUSEADDR` set, as torch's `TCPStore` has it.

    Args:
        host: The address to bind, by default every one of the machine.
    """

    number: int
    """The port."""

    def __init__(self, host: str = "") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back; one who listens on it keeps it. Calling it twice is fine."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RandomState:
    """The default generators of this process, and one of its own for sampling tokens.

    Args:
        seed: Ranks that must draw alike are given the same one.
        device: Where tokens are sampled.
    """

    def __init__(self, seed: int, *, device: torch.device) -> None:
        torch.manual_seed(seed)
        self._device = device
        self.sampling = torch.Generator(device=device).manual_seed(seed)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the states, uint8 tensors on the CPU."""
        state = {"cpu": torch.get_rng_state(), "sampling": self.sampling.get_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take up where `state_dict` left off."""
        torch.set_rng_state(state["cpu"])
        self.sampling.set_state(state["sampling"])
        if self._device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)
