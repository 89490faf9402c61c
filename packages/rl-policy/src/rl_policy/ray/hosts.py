"""The actors of ranks: their process and worker, and how the driver starts, calls and awaits them.

One whose group has ended in order is kept for a group of the same kind that follows.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import ray
import torch
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rl_interfaces.backend.runtime import ReservedPort

from rl_policy.ray.failures import is_death
from rl_policy.ray.objects import RowsOfRank, pack_result, take_rows

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from rl_batched_data import BatchedDataDict

# How long the other ranks have to fail too, once one has: long enough for Ray to notice the death
# that made a peer's connection break.
GRACE_S = 3.0
# How much later than the first a rank may finish to be taken with it.
_TOGETHER_S = 0.01
# One number, or one per level of nested parallelism.
_THREADS = re.compile(r"[1-9]\d*(,[1-9]\d*)*")


class HostedWorker(Protocol):
    """A worker of any kind; its other methods are called by name."""

    def shutdown(self) -> object:
        """Leave the process group and release the device."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where Ray runs a rank."""

    node_id: str
    """Ray's id of the node."""
    gpu_ids: tuple[str, ...]
    """The GPUs that Ray has assigned, as `CUDA_VISIBLE_DEVICES` names them."""
    num_cores: int
    """Cores that the process may use."""


class WorkerHost:
    """The Ray actor of one rank. It holds the worker, which itself knows nothing of Ray.

    Args:
        name: The worker group's, a prefix of the lines that this process prints.
        rank: The rank.
    """

    def __init__(self, name: str, rank: int) -> None:
        # Until the worker's class has been imported, see `construct`.
        gc.disable()
        self._label = f"{name}-{rank}"
        self._worker: HostedWorker | None = None
        self._port: ReservedPort | None = None

    def __repr__(self) -> str:
        # Ray prefixes the actor's output with it.
        return self._label

    def locate(self) -> Placement:
        """Return where this process runs."""
        return Placement(
            node_id=ray.get_runtime_context().get_node_id(),
            gpu_ids=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
            num_cores=_num_cores(),
        )

    def reserve_address(self) -> tuple[str, int]:
        """Return this node's address and a port there, which this process holds until it ends."""
        self._port = ReservedPort()
        return ray.util.get_node_ip_address(), self._port.number

    def set_environment(self, environment: Mapping[str, str]) -> None:
        """Set this process's environment, see `rank_environments`.

        A call of its own, before the worker's class arrives: to unpickle a class is to import its
        module, and one that asks for a GPU there fixes `CUDA_VISIBLE_DEVICES` for the process.
        """
        os.environ.update(environment)
        _keep_off_terminal()
        # torch has read the variable already, when Ray had set it to 1. A list is for nested
        # parallelism, the outermost level first.
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"].split(",")[0]))

    def construct(
        self,
        worker_class: Callable[..., HostedWorker],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> None:
        """Construct the worker, in the environment that was set."""
        # Modules are objects by the hundred thousand, which the collector would go through again
        # and again: it is a fifth of the time of importing a backend, and of every later call.
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        self._worker = worker_class(*args, **kwargs)

    def call(self, method: str, keep_result: bool, *args: object, **kwargs: object) -> object:
        """Call a method of the worker.

        Args:
            method: Its name.
            keep_result: False: return None, as another rank returns the same result.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        result = getattr(self._worker, method)(*args, **kwargs)
        return result if keep_result else None

    def call_on_rows(
        self,
        method: str,
        keep_result: bool,
        kwargs: Mapping[str, object],
        places: bytes,
        *blocks: BatchedDataDict,
    ) -> object:
        """Call a method of the worker with its rows of a batch, see `BatchStore`.

        The result is packed, see `pack_result`.

        Args:
            method: Its name.
            keep_result: False: return None, as another rank returns the same result.
            kwargs: Its keyword arguments.
            places: Pickled: the plan of the rows, and for each column the block that has it and
                its key there.
            blocks: What the driver has put into the object store.
        """
        plan, sources = pickle.loads(places)
        rows = take_rows(plan, sources, blocks)
        return pack_result(self.call(method, keep_result, rows, **kwargs))

    def peak_memory(self) -> int:
        """Return the most bytes that tensors have had on the GPU; without one, the process.

        The process may have run an earlier worker, see `SpareHosts`.
        """
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            return torch.cuda.max_memory_allocated()
        # In KiB on Linux, the one system that Ray places ranks on here; in bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def shutdown(self) -> None:
        """Shut the worker down, if it was constructed, and forget it: another may follow."""
        if self._worker is not None:
            self._worker.shutdown()
        self._worker = self._port = None

    def clear(self) -> None:
        """Free the memory of a worker that was shut down, and count its peak anew on a GPU."""
        # Autograd and hooks of modules are cycles.
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def rank_environments(
    placements: Sequence[Placement],
    *,
    address: str,
    port: int,
    omp_num_threads: str | None,
) -> list[dict[str, str]]:
    """Return torchrun's environment variables for each rank.

    Every rank sees all GPUs of the group on its node, its own at index `LOCAL_RANK`. In a group
    without GPUs a rank sees none, even if the machine has some. Its threads get an equal share of
    the node's cores: beside a GPU, too, an offloaded optimizer computes on them.

    Example, two ranks on node `a` with GPUs 2 and 3, one on node `b` with GPU 0:
        RANK                  0    1    2
        LOCAL_RANK            0    1    0
        CUDA_VISIBLE_DEVICES  2,3  2,3  0

    Args:
        placements: Where each rank runs, in rank order.
        address: Of rank 0's node.
        port: A port there that rank 0 has reserved.
        omp_num_threads: The user's own setting, which is kept. None: not set.

    Raises:
        ValueError: The user's setting is no number of threads.
    """
    if omp_num_threads and not _THREADS.fullmatch(omp_num_threads):
        raise ValueError(
            f"OMP_NUM_THREADS={omp_num_threads!r} in the environment must be a positive number: "
            "unset it for an equal share of the cores"
        )
    ranks_on: dict[str, list[int]] = {}
    for rank, placement in enumerate(placements):
        ranks_on.setdefault(placement.node_id, []).append(rank)
    environments: list[dict[str, str]] = []
    for rank, placement in enumerate(placements):
        neighbours = ranks_on[placement.node_id]
        gpus = [gpu for neighbour in neighbours for gpu in placements[neighbour].gpu_ids]
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(placements)),
            "LOCAL_RANK": str(neighbours.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(neighbours)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        }
        # Ray sets OMP_NUM_THREADS to an actor's CPUs, which are logical and here only one.
        share = max(1, placement.num_cores // len(neighbours))
        environment["OMP_NUM_THREADS"] = omp_num_threads or str(share)
        environments.append(environment)
    return environments


def _keep_off_terminal() -> None:
    """Silence what Ray would print over the driver's own bar, once for each rank.

    These are progress bars of Hugging Face libraries, and warnings of libraries to their callers.
    Who sets the variables has it otherwise.
    """
    if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        # Read when they are imported, which a fork of a process with imports has done.
        hub = sys.modules.get("huggingface_hub.utils")
        if hub is not None:
            hub.disable_progress_bars()
        transformers_logging = sys.modules.get("transformers.utils.logging")
        if transformers_logging is not None:
            transformers_logging.disable_progress_bar()
    if "PYTHONWARNINGS" not in os.environ:
        # For processes that this one starts, and for itself.
        os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning"
        warnings.filterwarnings("ignore", category=FutureWarning)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupKind:
    """What a group of ranks has to have in common with another to run in its processes."""

    worker_class: Callable[..., HostedWorker]
    """Its module is imported there; another's could want another environment."""
    name: str
    """The prefix of what the ranks print."""
    bundles: tuple[tuple[str, int], ...]
    """For each rank the id of the placement group, and the bundle in it."""
    lanes: tuple[str, ...]
    """The concurrency groups of the actors."""


class SpareHosts:
    """The actors of a group that has ended in order, kept for one of the same kind that follows.

    To start a process, and to import there what its worker needs, takes longer than a small model
    takes to train. A spare actor holds its CPU and its share of a GPU, so that no group is started
    beside spare ones: it takes them or ends them.
    """

    def __init__(self) -> None:
        self._is_keeping = False
        self._kind: GroupKind | None = None
        self._hosts: list[ActorHandle] = []

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep the actors of the last group that ends within the context; they outlast it."""
        self._is_keeping = True
        try:
            yield
        finally:
            self._is_keeping = False

    def keep(self, kind: GroupKind, hosts: Sequence[ActorHandle]) -> bool:
        """Return whether the actors, whose workers have been shut down, are kept."""
        if self._is_keeping:
            self.end()
            self._kind, self._hosts = kind, list(hosts)
        return self._is_keeping

    def take(self, kind: GroupKind) -> list[ActorHandle]:
        """Return the spare actors in rank order if they are of a kind; else end them, return []."""
        if kind != self._kind:
            self.end()
        hosts, self._hosts, self._kind = self._hosts, [], None
        return hosts

    def end(self) -> None:
        """End what is spare."""
        for host in self._hosts:
            ray.kill(host)
        self._hosts, self._kind = [], None


def create_host(
    group: PlacementGroup, bundle: int, *, name: str, rank: int, lanes: Sequence[str]
) -> ActorHandle:
    """Start the actor of one rank, on one CPU of its bundle and that fraction of its GPU."""
    # A bundle has a CPU for each group that may share it, and each gets that share of the GPU.
    resources = group.bundle_specs[bundle]
    # Ray takes concurrency groups at this place alone.
    remote: Any = ray.remote
    make = remote(concurrency_groups=dict.fromkeys(lanes, 1)) if lanes else remote
    options = make(WorkerHost).options(
        num_cpus=1,
        num_gpus=resources.get("GPU", 0) / resources["CPU"],
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        ),
    )
    host = options.remote(name, rank)
    # By its type it could also be the class itself, which shows the methods' signatures.
    assert isinstance(host, ActorHandle)
    return host


class HostCall(NamedTuple):
    """A call of a method of `WorkerHost`, before a rank is called."""

    method: str
    args: tuple[object, ...] = ()
    """References among them are replaced by what they refer to."""
    kwargs: Mapping[str, object] = MappingProxyType({})
    lane: str | None = None
    """The thread that runs it, after the calls that were made in its lane. None: the main one."""

    def start(self, host: ActorHandle) -> ray.ObjectRef:
        """Call a rank."""
        call = getattr(host, self.method)
        if self.lane is not None:
            call = call.options(concurrency_group=self.lane)
        return call.remote(*self.args, **self.kwargs)


def rows_call(
    method: str, keep_result: bool, *, arguments: ray.ObjectRef, rows: RowsOfRank
) -> HostCall:
    """Return the call of a worker's method with rows of a batch.

    Args:
        method: The worker's method.
        keep_result: Whether its result is returned.
        arguments: Its keyword arguments, in the object store.
        rows: Its rows.
    """
    # As bytes, which Ray takes as they are: sending two objects took the driver twice as long.
    places = pickle.dumps((rows.plan, rows.sources), protocol=5)
    # Ray replaces the references that are arguments by what they refer to, so none is in a tuple.
    return HostCall("call_on_rows", (method, keep_result, arguments, places, *rows.blocks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The results and failures of a call."""

    results: dict[int, Any] = field(default_factory=dict)
    """What each rank returned."""
    failures: dict[int, Exception] = field(default_factory=dict)
    """What Ray raised for each rank that failed."""
    unfinished: list[int] = field(default_factory=list)
    """Ranks that were still running when the wait ended."""

    @property
    def is_idle(self) -> bool:
        """Whether every rank is alive and can take the next call."""
        return not self.unfinished and not any(map(is_death, self.failures.values()))


def wait_for_ranks(
    refs: Sequence[ray.ObjectRef],
    ranks: Sequence[int] | None = None,
    *,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Wait until all ranks have finished, or for `grace_s` after the first failure.

    Args:
        refs: The future of each rank's call, in rank order.
        ranks: The rank of each of them. None: 0, 1, ...
        timeout_s: Limit in seconds. None: as long as every rank is alive.
        grace_s: Seconds that the other ranks have to finish once one has failed.
    """
    waiting = dict(zip(refs, range(len(refs)) if ranks is None else ranks, strict=True))
    deadline = float("inf") if timeout_s is None else monotonic() + timeout_s
    outcome = Outcome()
    while waiting and (left := deadline - monotonic()) > 0:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=min(left, 1.0))
        if ready and len(waiting) > 1:
            # Those that finish together are taken together: one by one would be quadratic in ranks.
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=_TOGETHER_S)
        failed_before = len(outcome.failures)
        _take(ready, waiting, outcome)
        if len(outcome.failures) > failed_before:
            deadline = min(deadline, monotonic() + grace_s)
    outcome.unfinished.extend(waiting.values())
    return outcome


def _take(ready: list[ray.ObjectRef], waiting: dict[ray.ObjectRef, int], outcome: Outcome) -> None:
    """Move what has finished from `waiting` to the outcome."""
    ranks = [waiting.pop(ref) for ref in ready]
    try:
        results = ray.get(ready)
    except Exception:  # of one of them, which is found one by one
        for rank, ref in zip(ranks, ready, strict=True):
            try:
                outcome.results[rank] = ray.get(ref)
            except Exception as error:  # any: `root_failure` decides which of them is raised
                outcome.failures[rank] = error
    else:
        outcome.results.update(zip(ranks, results, strict=True))
