"""The actors of ranks: how one is started, and how its worker is called without waiting."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_policy.ray.objects import RowsOfRank
from rl_policy.ray.worker_host import HostedWorker, WorkerHost

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


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


def call_worker(
    host: ActorHandle,
    method: str,
    keep_result: bool,
    *,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> ray.ObjectRef:
    """Start a call of the worker's `method`; the future is of None unless `keep_result`."""
    return host.call.remote(method, keep_result, *args, **kwargs)


def call_in_lane(
    host: ActorHandle,
    method: str,
    keep_result: bool,
    *,
    lane: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> ray.ObjectRef:
    """Do as `call_worker`, after the calls that were made in the same lane alone."""
    in_lane = host.call.options(concurrency_group=lane)
    return in_lane.remote(method, keep_result, *args, **kwargs)


def call_on_rows(
    host: ActorHandle,
    method: str,
    keep_result: bool,
    *,
    arguments: ray.ObjectRef,
    rows: RowsOfRank,
) -> ray.ObjectRef:
    """Do as `call_worker`, with rows of a batch and the keyword arguments in the object store."""
    # As bytes, which Ray takes as they are: sending two objects took the driver twice as long.
    places = pickle.dumps((rows.plan, rows.sources), protocol=5)
    # Ray replaces the references that are arguments by what they refer to, so none is in a tuple.
    return host.call_on_rows.remote(method, keep_result, arguments, places, *rows.blocks)
