"""One worker per rank, each in a Ray actor of its own, called together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from rl_policy.ray.cluster import RayVirtualCluster, bundle_nodes, rank_bundles
from rl_policy.ray.failures import (
    WorkerDiedError,
    WorkerGroupError,
    root_failure,
    to_exception,
)
from rl_policy.ray.hosts import (
    GRACE_S,
    GroupKind,
    HostCall,
    HostedWorker,
    Outcome,
    SpareHosts,
    create_host,
    rank_environments,
    rows_call,
    wait_for_ranks,
)
from rl_policy.ray.objects import BatchStore, unpack_result
from rl_policy.ray.relays import FAN_OUT, Relays
from rl_policy.ray.sharding import DATA_AXIS, NamedSharding

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict
    from rl_batched_data.sharding import ShardPlan
    from rl_interfaces import Cluster

logger = logging.getLogger(__name__)

# Of Ray's concurrency groups, the one of `submit_beside`.
_BESIDE = "beside"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCall:
    """A call that is running on every rank."""

    method: str
    """The method that was called."""
    refs: list[ray.ObjectRef]
    """One future per rank, or per relay."""
    result_ranks: list[int]
    """The ranks whose results are used; the others hold the same and return None."""
    ranks: list[int] | None = None
    """The ranks that were called, in the futures' order. None: 0, 1, ..."""
    number: int | None = None
    """Of the call, which relays have made. None: the driver has."""


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
        fan_out: Ranks that are called from one place: where there are more, and they need each
            other, the driver calls relays, and each of these that many ranks.

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
        fan_out: int = FAN_OUT,
    ) -> None:
        self.ranks_stand_alone = ranks_stand_alone
        self._lost: set[int] = set()
        self._dead_actors: set[str] = set()
        self.num_deaths = [0] * sharding.size
        self.name = name
        self.sharding = sharding
        self._hosts: list[ActorHandle] = []
        self._relays: Relays | None = None
        self._fan_out = fan_out
        self._failure: Exception | None = None
        self._ended_in_order: bool | None = None
        self._is_handed_over = False
        threads = [*([_BESIDE] if takes_calls_beside else []), *lanes]
        self._lanes = threads
        # Another framework's cluster keeps none.
        is_ours = isinstance(cluster, RayVirtualCluster)
        self._spare = cluster.spare_hosts if is_ours else SpareHosts()
        groups = cluster.get_placement_groups()
        bundles = rank_bundles(bundle_nodes(cluster), workers_per_node=workers_per_node)
        if len(bundles) != sharding.size:
            raise ValueError(f"{len(bundles)} bundles do not fit {sharding.size} ranks")
        try:
            self._places = [(groups[node], bundle) for node, bundle in bundles]
            self._kind = GroupKind(
                worker_class=worker_class,
                name=name,
                bundles=tuple((group.id.hex(), bundle) for group, bundle in self._places),
                lanes=tuple(threads),
            )
            self._hosts = self._spare.take(self._kind)
            if self._hosts:
                self.wait(self._call_hosts("clear"), start_timeout_s)
            for rank in range(len(self._hosts), sharding.size):
                self._hosts.append(self._create_host(rank))
            self._start((worker_class, worker_args, worker_kwargs or {}), start_timeout_s)
        except BaseException:  # an interrupt too: actors outlive a constructor that fails
            self._kill()
            raise

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.sharding.size

    @property
    def has_ended(self) -> bool:
        """Whether calls are refused, after a failure or `shutdown`."""
        return self._failure is not None

    @property
    def ranks(self) -> list[int]:
        """The ranks that calls go to: all but those that were lost."""
        return [rank for rank in range(len(self._hosts)) if rank not in self._lost]

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
        calls = [HostCall("peak_memory")] * len(self.ranks)
        return self.wait(
            self._submit("peak_memory", calls, ranks=self.ranks, result_ranks=self.ranks)
        )

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
        calls = [HostCall("call", (method, True, *args), kwargs)] * len(ranks)
        return self._submit(method, calls, ranks=ranks, result_ranks=ranks)

    def start_all(self, method: str, *args: object, **kwargs: object) -> list[ray.ObjectRef]:
        """Call `method` with the same arguments on every rank; return Ray's future of each.

        They are not awaited here: no other call may follow before they are.
        """
        ranks = self.ranks
        calls = [HostCall("call", (method, True, *args), kwargs)] * len(ranks)
        return self._submit(
            method, calls, ranks=ranks, result_ranks=ranks, may_be_relayed=False
        ).refs

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
        calls = [HostCall("call", (method, True, *args), kwargs, _BESIDE)] * len(chosen)
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
        return HostCall("call", (method, True, *args), kwargs, lane).start(self._hosts[rank])

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
        ranks = self.ranks
        leaders = [rank for rank in self._leaders if rank in ranks]
        # The other ranks return None: copies of a result would only fill the object store.
        kept = set(leaders)
        calls = [
            rows_call(
                method,
                rank in kept,
                arguments=arguments,
                rows=placed[self._coordinates[rank]][self._nodes[rank]],
            )
            for rank in ranks
        ]
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
        outcome = self._outcome(call, timeout_s=timeout_s, grace_s=grace_s)
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
                self._is_handed_over = self._ended_in_order and self._spare.keep(
                    self._kind, self._hosts
                )
                self._kill()
        return self._ended_in_order

    def _start(
        self,
        construction: tuple[Callable[..., HostedWorker], Sequence[object], Mapping[str, object]],
        timeout_s: float,
    ) -> None:
        placements = self.wait(self._call_hosts("locate"), timeout_s)
        self._place([placement.node_id for placement in placements])
        if self.world_size > self._fan_out and not self.ranks_stand_alone:
            self._relays = Relays(
                self._hosts,
                nodes=self._nodes,
                name=self.name,
                lanes=self._lanes,
                fan_out=self._fan_out,
            )
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
        if self._relays is not None:
            self._relays.await_start(timeout_s)

    def _place(self, nodes: Sequence[str]) -> None:
        """Note which rows each rank gets, and on which node it needs them."""
        self._nodes = list(nodes)
        self._coordinates = self.sharding.get_positions(DATA_AXIS)
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
        calls: Sequence[HostCall],
        *,
        ranks: list[int],
        result_ranks: list[int],
        may_be_relayed: bool = True,
    ) -> RankCall:
        """Start a call of some ranks, in rank order."""
        self._refuse_after_end()
        relays = self._relays if may_be_relayed else None
        called = dict(zip(ranks, calls, strict=True))
        if relays is None:
            number = None
            started = (call.start(self._hosts[rank]) for rank, call in called.items())
        else:
            number, started = relays.start(called)
        refs: list[ray.ObjectRef] = []
        try:
            for ref in started:
                refs.append(ref)
        except BaseException:
            # Some ranks have received a call that the others never will: they would wait for them
            # in the next collective.
            if refs:
                reached = f"{method} reached {len(refs)} of {len(ranks)} ranks"
                self._failure = WorkerGroupError(reached)
                self._kill()
            raise
        return RankCall(
            method=method, refs=refs, result_ranks=result_ranks, ranks=ranks, number=number
        )

    def _outcome(self, call: RankCall, *, timeout_s: float | None, grace_s: float) -> Outcome:
        """Wait for a call, whoever has made it."""
        if call.number is None:
            return wait_for_ranks(call.refs, call.ranks, timeout_s=timeout_s, grace_s=grace_s)
        assert self._relays is not None, "they have made the call"
        assert call.ranks is not None, "`_submit` names them"
        return self._relays.wait(
            call.refs, call.ranks, number=call.number, timeout_s=timeout_s, grace_s=grace_s
        )

    def _refuse_after_end(self) -> None:
        if self._failure is not None:
            raise WorkerGroupError(f"{self.name} has ended: {self._failure}") from self._failure

    def _fail(self, outcome: Outcome, method: str) -> NoReturn:
        rank = root_failure(outcome.failures)
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
        # By relays where there are some: it would overtake what they have not passed on yet.
        calls = [HostCall("shutdown")] * len(self.ranks)
        call = self._submit("shutdown", calls, ranks=self.ranks, result_ranks=self.ranks)
        outcome = self._outcome(call, timeout_s=timeout_s, grace_s=GRACE_S)
        for rank, failure in outcome.failures.items():
            logger.warning("rank %d of %s did not end in order: %s", rank, self.name, failure)
        for rank in outcome.unfinished:
            logger.warning("rank %d of %s was still busy and is killed", rank, self.name)
        return not outcome.failures and not outcome.unfinished

    def _create_host(self, rank: int) -> ActorHandle:
        group, bundle = self._places[rank]
        return create_host(group, bundle, name=self.name, rank=rank, lanes=self._lanes)

    def _kill(self) -> None:
        """End every actor, unless they are spare ones, or another group's, by now."""
        if ray.is_initialized() and self._relays is not None:
            self._relays.kill()
        if ray.is_initialized() and not self._is_handed_over:
            for host in self._hosts:
                ray.kill(host)


def _nodes_of_coordinates(coordinates: Sequence[int], nodes: Sequence[str]) -> list[frozenset[str]]:
    """Return the nodes on which each data-parallel coordinate has ranks."""
    found: dict[int, set[str]] = {}
    for coordinate, node in zip(coordinates, nodes, strict=True):
        found.setdefault(coordinate, set()).add(node)
    return [frozenset(found[coordinate]) for coordinate in sorted(found)]
