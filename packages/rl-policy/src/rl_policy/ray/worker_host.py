"""One rank's process: its environment, its worker, and the calls that reach it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from rl_interfaces.backend.runtime import ReservedPort


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where Ray has put a rank."""

    node_id: str
    """Ray's id of the node."""
    gpu_ids: tuple[str, ...]
    """The GPUs that Ray has assigned, as `CUDA_VISIBLE_DEVICES` names them."""
    num_cores: int
    """Cores that the process may use."""


class WorkerHost:
    """A generic Ray actor that holds one worker, so that the worker itself knows nothing of Ray.

    Args:
        name: Prefix of the lines that this process prints.
        rank: The rank.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._label = f"{name}-{rank}"
        self._worker: Any = None
        self._port: ReservedPort | None = None

    def __repr__(self) -> str:
        return self._label

    def locate(self) -> Placement:
        """Return where this process runs."""
        return Placement(
            node_id=ray.get_runtime_context().get_node_id(),
            gpu_ids=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
            num_cores=_num_cores(),
        )

    def reserve_address(self) -> tuple[str, int]:
        """Return this node's address and a port there that is this process's until it ends."""
        self._port = ReservedPort()
        return ray.util.get_node_ip_address(), self._port.number

    def construct(
        self,
        environment: Mapping[str, str],
        worker_class: type,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Set the environment and construct the worker in it."""
        os.environ.update(environment)
        self._worker = worker_class(*args, **kwargs)

    def call(self, method: str, keep_result: bool, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker.

        Args:
            method: Its name.
            keep_result: False: return None, for a result that another rank returns as well.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        result = getattr(self._worker, method)(*args, **kwargs)
        return result if keep_result else None

    def shutdown(self) -> None:
        """Let the worker leave its process group."""
        if self._worker is not None:
            self._worker.shutdown()


def rank_environments(
    placements: Sequence[Placement],
    *,
    address: str,
    port: int,
    omp_num_threads: str | None,
) -> list[dict[str, str]]:
    """Return torchrun's environment variables for each rank.

    Every rank of a node sees all GPUs of the group on that node, its own at `LOCAL_RANK`; without
    GPUs it sees none, even where the machine has some, and gets its part of the node's cores.

    Example, two ranks on node `a` with GPUs 2 and 3, one on node `b` with GPU 0:
        RANK                  0    1    2
        LOCAL_RANK            0    1    0
        CUDA_VISIBLE_DEVICES  2,3  2,3  0

    Args:
        placements: Where each rank runs, in rank order.
        address: Of rank 0's node.
        port: A port there that is rank 0's to listen on.
        omp_num_threads: What the user has set, which is left as it is.
    """
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
        if omp_num_threads is not None:
            environment["OMP_NUM_THREADS"] = omp_num_threads
        elif not gpus:
            share = max(1, placement.num_cores // len(neighbours))
            environment["OMP_NUM_THREADS"] = str(share)
        environments.append(environment)
    return environments


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
