"""One worker per rank, each in a Ray actor of its own, called together.

`NamedSharding` says where each rank stands in the parallel layout, `RayWorkerGroup` starts the
ranks and calls them, and `wait_for_ranks` with `root_failure` finds, when a call fails, the one
failure that explains the others.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import ray
import torch.distributed
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_policy.ray.cluster import bundle_nodes, rank_bundles
from rl_policy.ray.objects import BatchStore, RowsOfRank, unpack_result
from rl_policy.ray.worker_host import HostedWorker, WorkerHost, rank_environments

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from ray.util.placement_group import PlacementGroup
    from rl_batched_data import BatchedDataDict
    from rl_batched_data.sharding import ShardPlan
    from rl_interfaces import Cluster, ParallelLayout

logger = logging.getLogger(__name__)

_DATA_AXIS = "data_parallel"
# Of Ray's concurrency groups, the one of `submit_beside`.
_BESIDE = "beside"
# How long the other ranks have to fail too, once one has: long enough for Ray to notice the death
# that made a peer's connection break.
GRACE_S = 3.0
# How much later than the first a rank may finish to be taken with it.
_TOGETHER_S = 0.01
# The errors of gloo and NCCL on the ranks that outlive the one that failed.
_PEER_ERROR = re.compile(r"gloo|nccl|closed by peer|reset by peer|broken pipe", re.IGNORECASE)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class NamedSharding:
    """A grid of ranks with named axes.

    Example, 4 ranks as two data-parallel groups of two tensor-parallel ranks:
        sharding = NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])
        sharding.get_worker_coords(2)                  -> {"data_parallel": 1, "tensor_parallel": 0}
        sharding.get_ranks_by_coord(tensor_parallel=1) -> [1, 3]
        sharding.get_ranks(data_parallel=1, tensor_parallel=0) -> 2

    Args:
        layout: The rank of each cell: unique integers, `len(names)` dimensions.
        names: The name of each dimension, outermost first.

    Raises:
        ValueError: The layout does not fit the names, or a rank is not unique.
    """

    def __init__(self, layout: ArrayLike, names: Sequence[str]) -> None:
        ranks = np.asarray(layout)
        if not np.issubdtype(ranks.dtype, np.integer):
            raise ValueError(f"the layout must hold integers, got {ranks.dtype}")
        if ranks.ndim != len(names):
            raise ValueError(f"the layout has {ranks.ndim} dimensions, names has {list(names)}")
        if len(set(names)) != len(names):
            raise ValueError(f"an axis is named twice: {list(names)}")
        values, counts = np.unique(ranks, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"ranks stand twice in the layout: {values[counts > 1].tolist()}")
        self._ranks = ranks.copy()
        self._ranks.flags.writeable = False
        self._names = tuple(names)

    @classmethod
    def from_layout(cls, layout: ParallelLayout) -> NamedSharding:
        """Return the grid of a backend's layout: pipeline outermost, tensor innermost."""
        names = ("pipeline_parallel", _DATA_AXIS, "context_parallel", "tensor_parallel")
        shape = [getattr(layout, name) for name in names]
        return cls(np.arange(layout.world_size).reshape(shape), names)

    @property
    def names(self) -> list[str]:
        """The axes, outermost first."""
        return list(self._names)

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis."""
        return dict(zip(self._names, self._ranks.shape, strict=True))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._ranks.ndim

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    @property
    def layout(self) -> np.ndarray:
        """A copy of the ranks, with one dimension per axis."""
        return self._ranks.copy()

    def __eq__(self, other: object) -> bool:
        """Return whether `other` has the same ranks at the same places of the same axes."""
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(self._ranks, other._ranks)

    def __repr__(self) -> str:
        """Return an expression that makes an equal one."""
        return f"NamedSharding({self._ranks.tolist()}, {self.names})"

    def get_axis_index(self, name: str) -> int:
        """Return the place of one axis among `names`.

        Raises:
            ValueError: The axis is unknown.
        """
        if name not in self._names:
            raise ValueError(f"{name!r} is not an axis, the axes are {self.names}")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Return the size of one axis.

        Raises:
            ValueError: The axis is unknown.
        """
        return self._ranks.shape[self.get_axis_index(name)]

    def get_worker_coords(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on every axis.

        Raises:
            ValueError: The rank is unknown.
        """
        found = np.argwhere(self._ranks == rank)
        if len(found) == 0:
            raise ValueError(f"rank {rank} is not in the layout of {self.size} ranks")
        return dict(zip(self._names, found[0].tolist(), strict=True))

    def get_positions(self, name: str) -> list[int]:
        """Return the position on one axis of every rank, for ranks 0, 1, ...

        Raises:
            ValueError: The axis is unknown.
        """
        size, axis = self.get_axis_size(name), self.get_axis_index(name)
        shape = [size if place == axis else 1 for place in range(self.ndim)]
        positions = np.broadcast_to(np.arange(size).reshape(shape), self._ranks.shape)
        return positions.flatten()[np.argsort(self._ranks, axis=None)].tolist()

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Return the ranks at the given positions, in the order of the layout.

        Args:
            coords: A position per axis name. An axis that is left out takes all its positions; one
                outside its axis has no ranks.

        Raises:
            ValueError: An axis is unknown.
        """
        if any(not 0 <= coords[name] < self.get_axis_size(name) for name in coords):
            return []
        return self._at(coords).flatten().tolist()

    def get_ranks(self, **coords: int) -> int | NamedSharding:
        """Return the rank at a position on every axis, or the grid of the axes that are left out.

        Raises:
            ValueError: An axis is unknown.
            IndexError: A position is outside its axis.
        """
        for name, position in coords.items():
            size = self.get_axis_size(name)
            if not 0 <= position < size:
                raise IndexError(f"{name}={position} is outside the axis, which has size {size}")
        left = [name for name in self._names if name not in coords]
        ranks = self._at(coords)
        return NamedSharding(ranks, left) if left else int(ranks)

    def _at(self, coords: Mapping[str, int]) -> np.ndarray:
        return np.asarray(self._ranks[tuple(coords.get(name, slice(None)) for name in self._names)])


class WorkerGroupError(RuntimeError):
    """The ranks cannot be called any more."""


class WorkerDiedError(WorkerGroupError):
    """The process of a rank has ended.

    Attributes:
        summary: Which rank, and in which call; one line.
        reason: What is known of its end; one line.
    """

    def __init__(self, summary: str, *, reason: str, details: str) -> None:
        super().__init__(f"{summary}: {details}")
        self.summary = summary
        self.reason = reason


def death_behind(error: BaseException) -> WorkerDiedError | None:
    """Return the death of a rank that an exception was raised for, or while handling; else None."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, WorkerDiedError):
        seen = seen.__cause__ or seen.__context__
    return seen


class RemoteTraceback(Exception):
    """The traceback on the rank, as the cause of the exception that the driver raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCall:
    """A call that is running on every rank."""

    method: str
    """The method that was called."""
    refs: list[ray.ObjectRef]
    """One future per rank."""
    result_ranks: list[int]
    """The ranks whose results are used; the others hold the same and return None."""
    ranks: list[int] | None = None
    """The rank of each future. None: 0, 1, ..."""


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
        return not self.unfinished and not any(map(_is_death, self.failures.values()))


class RayWorkerGroup:
    """The workers of one backend on the bundles of a cluster.

    A call goes to every rank. When a rank fails, the others get a few seconds to fail as well, and
    the root cause is raised: the exception of the worker itself, or `WorkerDiedError`. The group
    stays usable as long as every rank is alive and idle; otherwise all its actors are killed and
    later calls raise `WorkerGroupError`.

    Args:
        cluster: Where the ranks run.
        worker_class: A plain class; each rank constructs one, with torchrun's environment set.
        worker_args: Its positional arguments, pickled once for all ranks.
        worker_kwargs: Its keyword arguments, pickled once for all ranks.
        sharding: The axes of the ranks, one of which is `data_parallel`.
        name: Name of the group in errors, and prefix of its ranks' output.
        workers_per_node: How many bundles of each placement group to use. None: all.
        start_timeout_s: Limit of each step of the start, in seconds.
        takes_calls_beside: Whether `submit_beside` is used: its calls run in a thread of their own,
            and the worker's others no longer in the process's main thread.
        lanes: Names of further such threads, each for the calls of `submit_to` that name it.
        ranks_stand_alone: Whether the ranks do not need each other. One that dies then leaves the
            group usable: calls go to the others, until `replace` and `restore` bring it back.

    Raises:
        ValueError: The number of bundles is not the number of ranks of `sharding`.
        TimeoutError: The start took too long; the message names the ranks.
        Exception: Whatever the constructor of a worker raised.
    """

    def __init__(
        self,
        cluster: Cluster,
        worker_class: Callable[..., HostedWorker],
        worker_args: Sequence[object] = (),
        worker_kwargs: Mapping[str, object] | None = None,
        *,
        sharding: NamedSharding,
        name: str = "worker",
        workers_per_node: Sequence[int] | None = None,
        start_timeout_s: float = 600.0,
        takes_calls_beside: bool = False,
        lanes: Sequence[str] = (),
        ranks_stand_alone: bool = False,
    ) -> None:
        self.ranks_stand_alone = ranks_stand_alone
        self._lost: set[int] = set()
        self._dead_actors: set[str] = set()
        self.num_deaths = [0] * sharding.size
        self.name = name
        self.sharding = sharding
        self._hosts: list[ActorHandle] = []
        self._failure: Exception | None = None
        self._ended_in_order: bool | None = None
        threads = [*([_BESIDE] if takes_calls_beside else []), *lanes]
        self._lanes = threads
        groups = cluster.get_placement_groups()
        bundles = rank_bundles(bundle_nodes(cluster), workers_per_node=workers_per_node)
        if len(bundles) != sharding.size:
            raise ValueError(f"{len(bundles)} bundles do not fit {sharding.size} ranks")
        try:
            self._places = [(groups[node], bundle) for node, bundle in bundles]
            for rank in range(sharding.size):
                self._hosts.append(self._create_host(rank))
            self._start((worker_class, worker_args, worker_kwargs or {}), start_timeout_s)
        except BaseException:  # an interrupt too: actors outlive a constructor that fails
            self._kill()
            raise

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._hosts)

    @property
    def has_ended(self) -> bool:
        """Whether calls are refused, after a failure or `shutdown`."""
        return self._failure is not None

    @property
    def ranks(self) -> list[int]:
        """The ranks that calls go to: all but those that were lost."""
        return [rank for rank in range(self.world_size) if rank not in self._lost]

    @property
    def lost_ranks(self) -> list[int]:
        """The ranks that have died and were not restored, of ranks that stand alone."""
        return sorted(self._lost)

    def lose(self, ranks: Iterable[int]) -> None:
        """Count a death of some ranks, to which no more calls go, of ranks that stand alone."""
        for rank in ranks:
            self._lost.add(rank)
            self.num_deaths[rank] += 1
        if not self.ranks and self._failure is None:
            summary, reason = f"every rank of {self.name} died", "see the log of the driver"
            self._failure = WorkerDiedError(summary, reason=reason, details=reason)
            self._kill()

    def end_lost(self, ranks: Iterable[int]) -> None:
        """End the processes of lost ranks that still run, so that their bundles are free."""
        for rank in ranks:
            assert rank in self._lost, "it was lost"
            host = self._hosts[rank]
            # Calls that it leaves behind are no deaths of the process that follows it.
            self._dead_actors.add(host._actor_id.hex())
            ray.kill(host)

    def replace(self, rank: int) -> ray.ObjectRef[None]:
        """Start a rank that was lost anew, in its place; return the future of its construction.

        Calls do not go to it before `restore`, except those that name it.
        """
        self._refuse_after_end()
        self.end_lost([rank])
        host = self._hosts[rank] = self._create_host(rank)
        # In this order, as an actor's calls of one kind are.
        host.set_environment.remote(self._environments[rank])
        return host.construct.remote(*self._construction)

    def restore(self, ranks: Iterable[int]) -> None:
        """Make calls to some ranks again."""
        self._lost.difference_update(ranks)

    def run_all(self, method: str, *args: object, **kwargs: object) -> list[Any]:
        """Call `method` with the same arguments on every rank; return one result per rank."""
        return self.wait(self.submit_all(method, *args, **kwargs))

    def peak_memory(self) -> list[int]:
        """Return the most bytes that each rank has had allocated, see `WorkerHost.peak_memory`."""
        self._refuse_after_end()
        return self.wait(self._call_hosts("peak_memory"))

    def run_sharded(
        self, method: str, data: BatchedDataDict, plans: Sequence[ShardPlan], **kwargs: object
    ) -> list[Any]:
        """Call `method` on every rank, each data-parallel coordinate with its own rows.

        Args:
            method: The method's name.
            data: The full batch.
            plans: The rows of each data-parallel coordinate; all ranks of a coordinate get them.
            kwargs: Keyword arguments, the same for every rank.

        Returns:
            One result per data-parallel coordinate, of the first rank on the other axes.
        """
        return self.wait(self.submit_sharded(method, data, plans, **kwargs))

    def submit_all(self, method: str, *args: object, **kwargs: object) -> RankCall:
        """Start what `run_all` runs, without waiting for it."""
        ranks = self.ranks
        calls = [
            partial(_call, self._hosts[rank], method, args=args, kwargs=kwargs) for rank in ranks
        ]
        return self._submit(method, calls, ranks=ranks, result_ranks=ranks)

    def submit_beside(self, method: str, *args: object, **kwargs: object) -> RankCall:
        """Start a call on every rank that does not wait for the others that run there.

        Calls of this kind run one after another. The worker's method must allow that another one of
        its methods runs in another thread.
        """
        return self.submit_beside_on(self.ranks, method, *args, **kwargs)

    def submit_beside_on(
        self, ranks: Sequence[int], method: str, *args: object, **kwargs: object
    ) -> RankCall:
        """Do as `submit_beside`, on some ranks, in ascending order."""
        chosen = list(ranks)
        calls = [
            partial(
                _call_in_lane, self._hosts[rank], method, lane=_BESIDE, args=args, kwargs=kwargs
            )
            for rank in chosen
        ]
        return self._submit(method, calls, ranks=chosen, result_ranks=chosen)

    def submit_to(
        self, rank: int, method: str, *args: object, lane: str, **kwargs: object
    ) -> ray.ObjectRef[Any]:
        """Start a call on one rank, after the calls that were made in its lane alone.

        The worker's method must allow that other methods of it run in other threads, and must not
        need other ranks.

        Args:
            rank: The rank.
            method: The method's name.
            args: Its positional arguments.
            lane: One of those that the group was started with.
            kwargs: Its keyword arguments.

        Returns:
            The future of the result, which `ray.get` returns. `failure_of` explains its errors.
        """
        self._refuse_after_end()
        return _call_in_lane(self._hosts[rank], method, True, lane=lane, args=args, kwargs=kwargs)

    def failure_of(self, rank: int, method: str, failure: Exception) -> Exception:
        """Return the exception to raise for what Ray raised for a call of `submit_to`.

        It is the worker's own, or `WorkerDiedError` if the rank's process has ended.
        """
        self._note_death(rank, failure)
        return to_exception(failure, rank=rank, group=self.name, method=method)

    def submit_sharded(
        self, method: str, data: BatchedDataDict, plans: Sequence[ShardPlan], **kwargs: object
    ) -> RankCall:
        """Start what `run_sharded` runs, without waiting for it."""
        self._refuse_after_end()
        placed = self._store.put(data, plans)
        # Pickled once, not once per rank: a loss comes with what it closes over.
        arguments = ray.put(kwargs)
        calls: list[Callable[[bool], ray.ObjectRef]] = []
        ranks = self.ranks
        for rank in ranks:
            host, own = self._hosts[rank], placed[self._coordinates[rank]][self._nodes[rank]]
            calls.append(partial(_call_on_rows, host, method, arguments=arguments, rows=own))
        leaders = [rank for rank in self._leaders if rank in ranks]
        return self._submit(method, calls, ranks=ranks, result_ranks=leaders)

    def keeping_batches(self) -> AbstractContextManager[None]:
        """Return a context in which a column is sent once, see `BatchStore.keeping`."""
        return self._store.keeping()

    def wait(
        self, call: RankCall, timeout_s: float | None = None, *, grace_s: float = GRACE_S
    ) -> list[Any]:
        """Return the results of a call, or raise its root failure.

        Args:
            call: Returned by `submit_all` or `submit_sharded`.
            timeout_s: Limit in seconds, after which the group is killed. None: wait as long as
                every rank is alive.
            grace_s: Seconds that the other ranks have to finish once one has failed; the group is
                killed if one has not by then.
        """
        outcome = wait_for_ranks(call.refs, call.ranks, timeout_s=timeout_s, grace_s=grace_s)
        if outcome.failures:
            self._fail(outcome, call.method)
        if outcome.unfinished:
            self._failure = TimeoutError(
                f"ranks {sorted(outcome.unfinished)} of {self.name} did not finish {call.method} "
                f"within {timeout_s:.0f} s"
            )
            self._kill()
            raise self._failure
        return [unpack_result(outcome.results[rank]) for rank in call.result_ranks]

    def shutdown(self, timeout_s: float = 10.0) -> bool:
        """End every rank. Idempotent.

        Args:
            timeout_s: Seconds that the workers have to destroy their process groups.

        Returns:
            True if every worker ended in order, False if one had to be killed or had died.
        """
        if self._ended_in_order is None:
            self._ended_in_order = False  # remains if this is interrupted
            try:
                self._ended_in_order = (
                    self._failure is None and self._shut_workers_down(timeout_s) and not self._lost
                )
            finally:
                self._failure = self._failure or WorkerGroupError("it was shut down")
                self._kill()
        return self._ended_in_order

    def _start(
        self,
        construction: tuple[Callable[..., HostedWorker], Sequence[object], Mapping[str, object]],
        timeout_s: float,
    ) -> None:
        placements = self.wait(self._call_hosts("locate"), timeout_s)
        self._place([placement.node_id for placement in placements])
        # Rank 0 holds the port from here on, so that no other process can take it before the
        # worker's rendezvous listens there.
        address = self._hosts[0].reserve_address.remote()
        reserved = RankCall(method="reserve_address", refs=[address], result_ranks=[0])
        ((address, port),) = self.wait(reserved, timeout_s)
        environments = rank_environments(
            placements,
            address=address,
            port=port,
            omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        )
        ranks = list(range(self.world_size))
        refs: list[ray.ObjectRef] = [
            host.set_environment.remote(environment)
            for host, environment in zip(self._hosts, environments, strict=True)
        ]
        # Before the class is sent, whose import may already read the environment.
        self.wait(RankCall(method="set_environment", refs=refs, result_ranks=ranks), timeout_s)
        # Pickled once for all ranks, not once per rank.
        self._construction = [ray.put(part) for part in construction]
        self._environments = environments
        refs = [host.construct.remote(*self._construction) for host in self._hosts]
        self.wait(RankCall(method="__init__", refs=refs, result_ranks=ranks), timeout_s)

    def _place(self, nodes: Sequence[str]) -> None:
        """Note which rows each rank gets, and on which node it needs them."""
        self._nodes = list(nodes)
        self._coordinates = self.sharding.get_positions(_DATA_AXIS)
        # The first rank of each coordinate on the other axes.
        first = {place: rank for rank, place in reversed([*enumerate(self._coordinates)])}
        self._leaders = [first[place] for place in sorted(first)]
        self._store = BatchStore(_nodes_of_coordinates(self._coordinates, self._nodes))

    def _call_hosts(self, method: str) -> RankCall:
        """Start a call of the `WorkerHost`s themselves."""
        refs = [getattr(host, method).remote() for host in self._hosts]
        return RankCall(method=method, refs=refs, result_ranks=list(range(self.world_size)))

    def _submit(
        self,
        method: str,
        calls: Sequence[Callable[[bool], ray.ObjectRef]],
        *,
        ranks: list[int],
        result_ranks: list[int],
    ) -> RankCall:
        """Start a call on some ranks, in rank order."""
        self._refuse_after_end()
        # The other ranks return None: copies of a result would only fill the object store.
        kept = set(result_ranks)
        refs: list[ray.ObjectRef] = []
        try:
            for rank, call in zip(ranks, calls, strict=True):
                refs.append(call(rank in kept))
        except BaseException:
            # Some ranks have received a call that the others never will: they would wait for them
            # in the next collective.
            if refs:
                reached = f"{method} reached {len(refs)} of {len(ranks)} ranks"
                self._failure = WorkerGroupError(reached)
                self._kill()
            raise
        return RankCall(method=method, refs=refs, result_ranks=result_ranks, ranks=ranks)

    def _refuse_after_end(self) -> None:
        if self._failure is not None:
            raise WorkerGroupError(f"{self.name} has ended: {self._failure}") from self._failure

    def _fail(self, outcome: Outcome, method: str) -> NoReturn:
        rank = root_failure(outcome)
        error = to_exception(outcome.failures[rank], rank=rank, group=self.name, method=method)
        others = sorted(set(outcome.failures) - {rank})
        if others:
            error.add_note(f"ranks {others} failed as well")
        if self.ranks_stand_alone:
            for other, failure in outcome.failures.items():
                self._note_death(other, failure)
        # A busy rank waits in a collective for one that has left it, and would never take a call.
        elif not outcome.is_idle:
            self._failure = error
            self._kill()
        raise error

    def _note_death(self, rank: int, failure: Exception) -> None:
        """Lose a rank that stands alone; calls that its process has left behind count once."""
        if not self.ranks_stand_alone or not isinstance(failure, RayActorError):
            return
        if failure.actor_id not in self._dead_actors:
            self._dead_actors.add(failure.actor_id)
            self.lose([rank])

    def _shut_workers_down(self, timeout_s: float) -> bool:
        if not ray.is_initialized():
            return False
        refs = [self._hosts[rank].shutdown.remote() for rank in self.ranks]
        outcome = wait_for_ranks(refs, self.ranks, timeout_s=timeout_s)
        for rank, failure in outcome.failures.items():
            logger.warning("rank %d of %s did not end in order: %s", rank, self.name, failure)
        for rank in outcome.unfinished:
            logger.warning("rank %d of %s was still busy and is killed", rank, self.name)
        return not outcome.failures and not outcome.unfinished

    def _create_host(self, rank: int) -> ActorHandle:
        group, bundle = self._places[rank]
        return _create_host(group, bundle, name=self.name, rank=rank, lanes=self._lanes)

    def _kill(self) -> None:
        if ray.is_initialized():
            for host in self._hosts:
                ray.kill(host)


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
            except Exception as error:  # any: `_fail` decides which of them is raised
                outcome.failures[rank] = error
    else:
        outcome.results.update(zip(ranks, results, strict=True))


def root_failure(outcome: Outcome) -> int:
    """Return the rank whose failure explains the others.

    The death of a process precedes an exception, and an exception precedes the errors that
    `torch.distributed` raises on ranks that have lost a peer.
    """
    return min(outcome.failures, key=lambda rank: (_depth(outcome.failures[rank]), rank))


def to_exception(failure: Exception, *, rank: int, group: str, method: str) -> Exception:
    """Return the exception that the driver raises: the worker's own if there is one.

    Args:
        failure: What Ray raised.
        rank: The rank that failed.
        group: The name of the worker group.
        method: The method that was called.
    """
    where = f"rank {rank} of {group}"
    if _is_death(failure):
        return WorkerDiedError(
            f"{where} died during {method}", reason=_reason(str(failure)), details=str(failure)
        )
    cause = failure.cause if isinstance(failure, RayTaskError) else None
    if not isinstance(cause, Exception) or isinstance(cause, RayError):
        # The worker's exception could not be pickled, and only its text has arrived.
        return WorkerGroupError(f"{where} failed during {method}: {failure}")
    cause.__cause__ = RemoteTraceback(_COLOR.sub("", str(failure)))
    cause.add_note(f"raised on {where} during {method}")
    return cause


def _reason(text: str) -> str:
    """Return what Ray's report of a process's end says, in one line."""
    lines = [line.strip() for line in _COLOR.sub("", text).splitlines() if line.strip()]
    memory = next((line for line in lines if "memory" in line and "%" in line), None)
    if memory is not None:
        return f"Ray's memory monitor killed it: {memory[:300]}"
    if "End of file" in text:
        # What a raylet sees of SIGKILL, whoever has sent it.
        available, total = (
            os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") / 2**30
            for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
        )
        return (
            "its process was killed, or crashed: it has left no exit status; "
            f"{available:.1f} of {total:.1f} GiB of this machine's memory are free now"
        )
    return " ".join(lines)[:300]


def _is_death(failure: Exception) -> bool:
    return isinstance(failure, RayActorError)


def _depth(failure: Exception) -> int:
    if _is_death(failure):
        return 0
    cause = failure.cause if isinstance(failure, RayTaskError) else failure
    # torch's errors of a collective on this rank are mostly the consequence of a lost peer.
    if isinstance(cause, torch.distributed.DistError):
        return 2
    is_peer_error = isinstance(cause, RuntimeError) and _PEER_ERROR.search(str(cause))
    return 2 if is_peer_error else 1


def _call(
    host: ActorHandle,
    method: str,
    keep_result: bool,
    *,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> ray.ObjectRef:
    return host.call.remote(method, keep_result, *args, **kwargs)


def _call_in_lane(
    host: ActorHandle,
    method: str,
    keep_result: bool,
    *,
    lane: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> ray.ObjectRef:
    call = host.call.options(concurrency_group=lane)
    return call.remote(method, keep_result, *args, **kwargs)


def _call_on_rows(
    host: ActorHandle,
    method: str,
    keep_result: bool,
    *,
    arguments: ray.ObjectRef,
    rows: RowsOfRank,
) -> ray.ObjectRef:
    # As bytes, which Ray takes as they are: sending two objects took the driver twice as long.
    places = pickle.dumps((rows.plan, rows.sources), protocol=5)
    # Ray replaces the references that are arguments by what they refer to, so none is in a tuple.
    return host.call_on_rows.remote(method, keep_result, arguments, places, *rows.blocks)


def _nodes_of_coordinates(coordinates: Sequence[int], nodes: Sequence[str]) -> list[frozenset[str]]:
    """Return the nodes on which each data-parallel coordinate has ranks."""
    found: dict[int, set[str]] = {}
    for coordinate, node in zip(coordinates, nodes, strict=True):
        found.setdefault(coordinate, set()).add(node)
    return [frozenset(found[coordinate]) for coordinate in sorted(found)]


def _create_host(
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
