"""The actors of ranks: how one is started, and how its worker is called without waiting."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_policy.ray.objects import RowsOfRank
from rl_policy.ray.worker_host import WorkerHost

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


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
