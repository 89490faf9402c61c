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
    from collections.abc import Callable, Generator, Iterable, Mapping

    from rl_interfaces.worker import GpuInfo

# torch 2.13 renamed it, and warns about the older name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# As a Ray on one machine gives its address, and as a user does.
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """This process's place in the job, from torchrun's environment variables."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @classmethod
    def from_environment(cls) -> RankEnvironment:
        """Read the variables; the device is this rank's GPU, or the CPU if there is none.

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


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Generator[None, None, None]:
    """Have environment variables within the context, and those before it afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def init_process_group(environment: RankEnvironment, *, timeout_s: float) -> bool:
    """Join the default process group; return False if the process is already in one.

    On CUDA, collectives on CPU tensors (offloaded parameters) use gloo.
    """
    if dist.is_initialized():
        return False
    on_cuda = environment.device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(environment.device)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        timeout=timeout,
        **_meeting_point(environment, timeout=timeout),
    )
    return True


def _meeting_point(environment: RankEnvironment, *, timeout: timedelta) -> dict[str, Any]:
    """Return the arguments by which ranks of one machine meet on its loopback interface alone.

    torch's own rendezvous listens on all interfaces, and its protocol asks for no secret. Nothing
    is returned where `MASTER_ADDR` is another address, or where torchrun has a store already: torch
    then meets as the environment says.
    """
    address = os.environ.get("MASTER_ADDR", "")
    if address not in _LOOPBACK or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}
    port, listener = int(os.environ["MASTER_PORT"]), None
    if environment.rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # With SO_REUSEADDR, beside a `ReservedPort`, which is bound to the number and does not
        # listen.
        try:
            listening = socket.create_server(
                (address, port), family=family, backlog=environment.world_size
            )
        except OSError as error:
            raise OSError(
                error.errno, f"rank 0 cannot listen on MASTER_PORT={port}: {error.strerror}"
            ) from error
        listener = listening.detach()  # the store closes it
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] # it is documented there
        address,
        port,
        environment.world_size,
        is_master=listener is not None,
        timeout=timeout,
        master_listen_fd=listener,
    )
    return {"store": store, "rank": environment.rank, "world_size": environment.world_size}


@contextmanager
def on_device(device: torch.device) -> Generator[None, None, None]:
    """Make `device` the current one of this thread inside; a no-op on the CPU.

    A new thread starts on the first GPU, whichever is the rank's. Whatever it asks CUDA for, the
    driver then makes a context there, of some hundred megabytes, for every rank of the node.
    """
    if device.type == "cpu":
        yield
        return
    with torch.accelerator.device_index(device.index):
        yield


def leave_process_group() -> None:
    """Destroy the default process group, unless that has been done already. Not collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy process groups of this rank, except the default one. Not collective.

    The default group may be the caller's. A group that is not destroyed keeps its threads and
    sockets.
    """
    if not dist.is_initialized():
        return  # destroyed along with the default group
    for group in dict.fromkeys(groups):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


_MAX_BYTES = 1024

Result = TypeVar("Result")


@contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Generator[None, None, None]:
    """Run the body on every rank; if it raises on any, raise on all. Collective.

    No rank then waits in a later collective for one that has failed. The body itself may only call
    collectives if it fails on all ranks alike.

    Raises:
        RuntimeError: The body raised on other ranks, and not on this one.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    device = _device_of(group)
    failed = torch.tensor(int(error is not None), device=device)
    # A number first: the texts of all ranks would be a kilobyte for each, at every call.
    dist.all_reduce(failed, group=group)
    if not int(failed):
        return
    text = f"{type(error).__name__}: {error}" if error is not None else ""
    failures = _share(text, group, device)
    if error is not None:
        raise error
    for rank, text in enumerate(failures):
        if text:
            raise RuntimeError(f"rank {rank} failed: {text}")


def first_rank_first(function: Callable[[], Result]) -> Result:
    """Return `function()` of this rank; rank 0 calls it before all others. Collective.

    For downloads and caches: the other ranks find the files that rank 0 has written.
    """
    with failing_together():
        result = function() if dist.get_rank() == 0 else None
    with failing_together():
        return function() if result is None else result


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return where the tensors of the group's collectives may be: on the CPU if it takes them."""
    on_cpu = "cpu:" in str(dist.get_backend_config(group))
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _share(text: str, group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    """All-gather a text, truncated to `_MAX_BYTES` of UTF-8."""
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
    """Return the GPU's UUID, or on the CPU a stable id of the host."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    machine = Path("/etc/machine-id")
    identity = machine.read_text().strip() if machine.is_file() else ""
    digest = hashlib.sha256(f"{identity}:{socket.gethostname()}".encode()).hexdigest()
    return f"CPU-{digest[:32]}"


def describe_device(
    environment: RankEnvironment, *, parameter_sample: dict[str, list[float]]
) -> GpuInfo:
    """Return the figures of `get_gpu_info`; memory is in MiB, and 0 on the CPU."""
    device = environment.device
    on_cuda = device.type == "cuda"

    def memory(read: Callable[[torch.device], int]) -> float:
        return read(device) / _MIB if on_cuda else 0.0

    return {
        "rank": environment.rank,
        "world_size": environment.world_size,
        "local_rank": environment.local_rank,
        "local_device_id": device.index if on_cuda else None,
        "global_device_id": device_id(device),
        "device_count": torch.cuda.device_count(),
        "device_name": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "memory_allocated_mb": memory(torch.cuda.memory_allocated),
        "memory_reserved_mb": memory(torch.cuda.memory_reserved),
        "peak_memory_allocated_mb": memory(torch.cuda.max_memory_allocated),
        "peak_memory_reserved_mb": memory(torch.cuda.max_memory_reserved),
        "env_vars": {name: os.environ.get(name) for name in _REPORTED_VARIABLES},
        "parameter_sample": parameter_sample,
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
            RuntimeError: A range is already open.
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
            RuntimeError: No range is open.
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
    """A TCP port that the system assigns to no other process while this object is open.

    A port that was free a moment ago may be taken before its listener binds it. Here a socket is
    bound to it without listening; a listener that sets `SO_REUSEADDR`, as torch's `TCPStore` does,
    can still bind the number.

    Args:
        host: The address to bind; by default all interfaces.
    """

    number: int
    """The port."""

    def __init__(self, host: str = "") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port; an established listener keeps it. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RandomState:
    """The default generators of torch, and a separate generator for sampling tokens.

    Args:
        seed: The same on ranks that must draw the same numbers.
        device: The device of the sampling generator.
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
        """Restore the states of `state_dict`."""
        torch.set_rng_state(state["cpu"])
        self.sampling.set_state(state["sampling"])
        if self._device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)
