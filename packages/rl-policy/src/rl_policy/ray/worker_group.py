"""One worker per rank, each in a Ray actor of its own, called together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_policy.ray.rank_calls import (
    GRACE_S,
    Outcome,
    WorkerGroupError,
    root_failure,
    to_exception,
    wait_for_ranks,
)
from rl_policy.ray.worker_host import WorkerHost, rank_environments

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from rl_interfaces import Cluster

    from rl_policy.ray.named_sharding import NamedSharding

logger = logging.getLogger(__name__)

_DATA_AXIS = "data_parallel"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCall:
    """A call that is running on every rank."""

    method: str
    """The method that was called."""
    refs: list[ray.ObjectRef]
    """One future per rank."""
    result_ranks: list[int]
    """The ranks whose results count; the others hold copies and return None."""


class RayWorkerGroup:
    """The workers of one backend on the bundles of a cluster.

    A call goes to every rank. When a rank fails, the others get a few seconds to fail as well, and
    what is raised is the failure behind them: the exception of the worker itself, or
    `WorkerDiedError`. The group stays usable as long as every rank is alive and idle; otherwise all
    its actors are ended and later calls raise `WorkerGroupError`.

    Args:
        cluster: Where the ranks run.
        worker_class: A plain class; each rank constructs one, with torchrun's environment set.
        worker_args: Its positional arguments, pickled once for all ranks.
        worker_kwargs: Its keyword arguments, pickled once for all ranks.
        sharding: The axes of the ranks, one of which is `data_parallel`.
        name: Names the group in errors and its ranks in what they print.
        workers_per_node: How many bundles of each placement group to use. None: all.
        start_timeout_s: Seconds that the start of all ranks may take together.

    Raises:
        ValueError: The bundles are not as many as the ranks of `sharding`.
        TimeoutError: The start took too long; the message names the ranks.
        Exception: Whatever the constructor of a worker raised.
    """

    def __init__(
        self,
        cluster: Cluster,
        worker_class: Callable[..., Any],
        worker_args: Sequence[Any] = (),
        worker_kwargs: Mapping[str, Any] | None = None,
        *,
        sharding: NamedSharding,
        name: str = "worker",
        workers_per_node: Sequence[int] | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.name = name
        self.sharding = sharding
        self._hosts: list[Any] = []
        self._failure: Exception | None = None
        self._ended_in_order: bool | None = None
        groups = cluster.get_placement_groups()
        bundles = rank_bundles(
            [bundle_nodes(group) for group in groups], workers_per_node=workers_per_node
        )
        if len(bundles) != sharding.size:
            raise ValueError(f"{len(bundles)} bundles do not fit {sharding.size} ranks")
        try:
            for rank, (node, bundle) in enumerate(bundles):
                self._hosts.append(_create_host(groups[node], bundle, name=name, rank=rank))
            self._start(
                cluster, (worker_class, worker_args, worker_kwargs or {}), limit_s=start_timeout_s
            )
        except BaseException:
            self._kill()
            raise

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._hosts)

    @property
    def has_ended(self) -> bool:
        """Whether no call is taken any more, after a failure or `shutdown`."""
        return self._failure is not None

    def run_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` with the same arguments on every rank; return one result per rank."""
        return self.wait(self.submit_all(method, *args, **kwargs))

    def run_sharded(self, method: str, shards: Sequence[Any], **kwargs: Any) -> list[Any]:
        """Call `method` with a shard of its own on each data-parallel coordinate.

        Args:
            method: The method.
            shards: One per data-parallel coordinate; all ranks of a coordinate get the same.
            kwargs: What every rank gets.

        Returns:
            One result per data-parallel coordinate, of the first rank on the other axes.
        """
        return self.wait(self.submit_sharded(method, shards, **kwargs))

    def submit_all(self, method: str, *args: Any, **kwargs: Any) -> RankCall:
        """Start what `run_all` runs, without waiting for it."""
        ranks = list(range(self.world_size))
        return self._submit(method, [args] * self.world_size, kwargs, result_ranks=ranks)

    def submit_sharded(self, method: str, shards: Sequence[Any], **kwargs: Any) -> RankCall:
        """Start what `run_sharded` runs, without waiting for it."""
        size = self.sharding.get_axis_size(_DATA_AXIS)
        if len(shards) != size:
            raise ValueError(f"{len(shards)} shards do not fit {_DATA_AXIS}={size}")
        stored = [ray.put(shard) for shard in shards]
        coords = [self.sharding.get_worker_coords(rank) for rank in range(self.world_size)]
        args = [(stored[coord[_DATA_AXIS]],) for coord in coords]
        leaders = [
            self.sharding.get_ranks_by_coord(**{_DATA_AXIS: position})[0]
            for position in range(size)
        ]
        return self._submit(method, args, kwargs, result_ranks=leaders)

    def wait(
        self, call: RankCall, timeout_s: float | None = None, *, grace_s: float = GRACE_S
    ) -> list[Any]:
        """Return the results of a call, or raise what made it fail.

        Args:
            call: What `submit_all` or `submit_sharded` has returned.
            timeout_s: Most seconds to wait; a group that takes longer is ended. None: as long as
                every rank is alive.
            grace_s: Seconds that the other ranks have to answer too, once one has failed. What
                has not by then is ended.
        """
        refs = dict(enumerate(call.refs))
        outcome = wait_for_ranks(refs, timeout_s=timeout_s, grace_s=grace_s)
        if outcome.failures:
            self._fail(outcome, call.method)
        if outcome.unfinished:
            self._failure = self._lateness(outcome, call.method, timeout_s)
            self._kill()
            raise self._failure
        return [outcome.results[rank] for rank in call.result_ranks]

    def shutdown(self, timeout_s: float = 10.0) -> bool:
        """End every rank; calling it twice is fine.

        Args:
            timeout_s: Seconds that the workers get to leave their process group.

        Returns:
            True when every worker ended in order, False when one had to be killed or had died.
        """
        if self._ended_in_order is None:
            self._ended_in_order = False  # stands where leaving is interrupted
            try:
                self._ended_in_order = self._failure is None and self._leave(timeout_s)
            finally:
                self._failure = self._failure or WorkerGroupError("it was shut down")
                self._kill()
        return self._ended_in_order

    def _start(
        self, cluster: Cluster, construction: tuple[Callable[..., Any], Any, Any], *, limit_s: float
    ) -> None:
        placements = self._collect(
            "locate", [host.locate.remote() for host in self._hosts], limit_s
        )
        first = self._hosts[0].reserve_address.remote()
        ((address, port),) = self._collect("reserve_address", [first], limit_s)
        environments = rank_environments(
            placements,
            address=address,
            port=port,
            omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        )
        stored = [ray.put(part) for part in construction]
        refs = [
            host.construct.remote(environment, *stored)
            for host, environment in zip(self._hosts, environments, strict=True)
        ]
        self._collect("__init__", refs, limit_s)

    def _collect(self, method: str, refs: Sequence[ray.ObjectRef], limit_s: float) -> list[Any]:
        outcome = wait_for_ranks(dict(enumerate(refs)), timeout_s=limit_s)
        if outcome.failures:
            self._fail(outcome, method)
        if outcome.unfinished:
            raise self._lateness(outcome, method, limit_s)
        return [outcome.results[rank] for rank in range(len(refs))]

    def _submit(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any],
        *,
        result_ranks: list[int],
    ) -> RankCall:
        if self._failure is not None:
            raise WorkerGroupError(f"{self.name} has ended: {self._failure}") from self._failure
        refs: list[ray.ObjectRef] = []
        try:
            for rank, host in enumerate(self._hosts):
                keep = rank in result_ranks
                refs.append(host.call.remote(method, keep, *args[rank], **kwargs))
        except BaseException:
            if refs:  # some ranks have a call that the others are never going to get
                reached = f"{method} reached {len(refs)} of {self.world_size} ranks"
                self._failure = WorkerGroupError(reached)
                self._kill()
            raise
        return RankCall(method=method, refs=refs, result_ranks=result_ranks)

    def _fail(self, outcome: Outcome, method: str) -> NoReturn:
        rank = root_failure(outcome)
        error = to_exception(outcome.failures[rank], rank=rank, group=self.name, method=method)
        others = sorted(set(outcome.failures) - {rank})
        if others:
            error.add_note(f"ranks {others} failed as well")
        if not outcome.is_idle:
            self._failure = error
            self._kill()
        raise error

    def _lateness(self, outcome: Outcome, method: str, limit_s: float | None) -> TimeoutError:
        ranks = sorted(outcome.unfinished)
        return TimeoutError(
            f"ranks {ranks} of {self.name} did not finish {method} within {limit_s:.0f} s"
        )

    def _leave(self, timeout_s: float) -> bool:
        if not ray.is_initialized():
            return False
        refs = [host.shutdown.remote() for host in self._hosts]
        outcome = wait_for_ranks(dict(enumerate(refs)), timeout_s=timeout_s)
        for rank, failure in outcome.failures.items():
            logger.warning("rank %d of %s did not end in order: %s", rank, self.name, failure)
        for rank in outcome.unfinished:
            logger.warning("rank %d of %s was still busy and is killed", rank, self.name)
        return not outcome.failures and not outcome.unfinished

    def _kill(self) -> None:
        if ray.is_initialized():
            for host in self._hosts:
                ray.kill(host)


def rank_bundles(
    bundle_nodes: Sequence[Sequence[str]], *, workers_per_node: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return the placement group and bundle of each rank, so that a node's ranks follow each other.

    Example, two placement groups of two bundles that Ray has spread over nodes `a` and `b`:
        rank_bundles([["a", "b"], ["a", "b"]]) -> [(0, 0), (1, 0), (0, 1), (1, 1)]

    Args:
        bundle_nodes: The node of each bundle of each placement group.
        workers_per_node: How many of each placement group's bundles to use. None: all.

    Raises:
        ValueError: More bundles are asked for than there are, or none.
    """
    counts = [len(nodes) for nodes in bundle_nodes]
    used = list(workers_per_node) if workers_per_node is not None else counts
    if len(used) != len(counts):
        raise ValueError(f"workers_per_node={used} does not fit {len(counts)} nodes")
    for node, (wanted, count) in enumerate(zip(used, counts, strict=True)):
        if not 1 <= wanted <= count:
            raise ValueError(
                f"workers_per_node={wanted} for node {node}, which has {count} bundles"
            )
    bundles = [(group, bundle) for group, wanted in enumerate(used) for bundle in range(wanted)]
    order: dict[str, int] = {}
    for group, bundle in bundles:
        order.setdefault(bundle_nodes[group][bundle], len(order))
    return sorted(bundles, key=lambda place: order[bundle_nodes[place[0]][place[1]]])


def bundles_per_node(
    cluster: Cluster, workers_per_node: int | Sequence[int] | None
) -> list[int] | None:
    """Return how many bundles of each node to use; None for all of them."""
    if isinstance(workers_per_node, int):
        return [workers_per_node] * len(cluster.get_placement_groups())
    return None if workers_per_node is None else list(workers_per_node)


def bundle_nodes(group: PlacementGroup) -> list[str]:
    """Return Ray's id of the node that each bundle of `group` is on."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[bundle] for bundle in range(group.bundle_count)]


def _create_host(group: PlacementGroup, bundle: int, *, name: str, rank: int) -> Any:
    """Start the actor of one rank: one CPU of its bundle, and that part of the bundle's GPU."""
    resources = group.bundle_specs[bundle]
    share = 1 / resources["CPU"]
    return (
        ray.remote(WorkerHost)
        .options(
            num_cpus=1,
            num_gpus=resources.get("GPU", 0) * share,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        )
        .remote(name, rank)
    )
