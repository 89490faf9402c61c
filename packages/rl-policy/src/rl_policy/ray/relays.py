"""Relays: actors that pass the driver's calls on to some of a large group's ranks each.

    driver --start--> relay --HostCall--> its ranks
    driver <--results of its ranks-- relay

A call costs its caller a quarter to half a millisecond for each process that it calls. Over a
thousand ranks that is half a second for each call of a step, in which all of them wait. With
`fan_out` ranks to a relay the driver calls a `fan_out`th of them.

Failures are those that the driver would see itself. A relay reports as soon as one of its ranks
has failed; the driver then asks all of them which of their ranks fail, or are still busy, within
the grace that one wait for all ranks would have, and gets from Ray what Ray says of each.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_policy.ray.hosts import HostCall, Outcome, wait_for_ranks
from rl_policy.ray.objects import PackedResult, join_results, unpack_result

logger = logging.getLogger(__name__)

FAN_OUT = 32
"""Ranks of a relay, and the most that a driver calls itself."""
# The thread of a relay that answers beside a call.
_REPORTS = "reports"
# To see what has finished already, and for an answer of a relay beyond the wait that it reports.
_LOOK_S = 0.1
_ANSWER_S = 30.0


class RanksFailed(Exception):
    """What a relay raises where one of its ranks has failed, which `Relay.report` tells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What has become of a call at the ranks of a relay."""

    failed: dict[int, ray.ObjectRef]
    """The futures of the ranks that have failed: `ray.get` raises what the driver looks for."""
    unfinished: list[int]
    """The ranks that are still running."""


class Relay:
    """The Ray actor that calls some ranks.

    Args:
        name: A prefix of the lines that this process prints.
        hosts: The actors of its ranks.
    """

    def __init__(self, name: str, hosts: Mapping[int, ActorHandle]) -> None:
        self._label = name
        self._hosts = hosts
        # By call, those that are running or have failed and were not reported.
        self._open: dict[int, dict[int, ray.ObjectRef]] = {}

    def __repr__(self) -> str:
        # Ray prefixes the actor's output with it.
        return self._label

    def ready(self) -> None:
        """Return once the process has started."""

    def start(self, number: int, calls: Mapping[int, HostCall]) -> PackedResult:
        """Call ranks; return their results as one, see `join_results`.

        Args:
            number: Of the call, for `report`.
            calls: The call of each rank, in rank order.

        Raises:
            RanksFailed: One of them has failed; the others may be running.
        """
        refs = {rank: call.start(self._hosts[rank]) for rank, call in calls.items()}
        self._open[number] = refs
        outcome = wait_for_ranks([*refs.values()], [*refs], grace_s=0.0)
        if outcome.failures:
            raise RanksFailed(f"ranks {sorted(outcome.failures)} have failed")
        del self._open[number]
        return join_results(outcome.results)

    def report(self, number: int, grace_s: float) -> Report:
        """Return what has become of a call; of one that has succeeded, nothing.

        Args:
            number: Of the call.
            grace_s: Seconds to wait for the ranks that are still running.
        """
        refs, limit = self._open.get(number, {}), max(grace_s, _LOOK_S)
        outcome = wait_for_ranks([*refs.values()], [*refs], timeout_s=limit, grace_s=limit)
        if outcome.failures and not outcome.unfinished:
            self._open.pop(number, None)
        return Report(
            failed={rank: refs[rank] for rank in outcome.failures},
            unfinished=outcome.unfinished,
        )


class Relays:
    """The relays of a group of ranks, which are started here.

    Args:
        hosts: The actors of the ranks, in rank order.
        nodes: The node of each rank; a relay runs on that of its first.
        name: Name of the group.
        lanes: The threads of the ranks' actors.
        fan_out: Ranks of a relay.
    """

    def __init__(
        self,
        hosts: Sequence[ActorHandle],
        *,
        nodes: Sequence[str],
        name: str,
        lanes: Sequence[str],
        fan_out: int,
    ) -> None:
        self._name, self._fan_out = name, fan_out
        self._numbers = count()
        self._ranks = [
            list(range(start, min(start + fan_out, len(hosts))))
            for start in range(0, len(hosts), fan_out)
        ]
        self._actors: list[ActorHandle] = []
        # Ray takes concurrency groups at this place alone.
        remote: Any = ray.remote
        make = remote(concurrency_groups=dict.fromkeys([*lanes, _REPORTS], 1))
        logger.info("%d relays call the %d ranks of %s", len(self._ranks), len(hosts), name)
        for ranks in self._ranks:
            options = make(Relay).options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[ranks[0]], soft=True),
            )
            label = f"{name}-relay-{ranks[0]}"
            self._actors.append(options.remote(label, {rank: hosts[rank] for rank in ranks}))

    def await_start(self, timeout_s: float) -> None:
        """Wait until all relays have started.

        Raises:
            TimeoutError: They have not.
        """
        refs: list[ray.ObjectRef] = [actor.ready.remote() for actor in self._actors]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        if len(ready) < len(refs):
            raise TimeoutError(
                f"{len(refs) - len(ready)} of {len(refs)} relays of {self._name} did not start "
                f"within {timeout_s:.0f} s"
            )
        ray.get(ready)

    def start(self, calls: Mapping[int, HostCall]) -> tuple[int, Iterator[ray.ObjectRef]]:
        """Return the number of a call, and what starts it and yields the future of each relay.

        Args:
            calls: The call of each rank, all in the same lane.
        """
        number = next(self._numbers)
        return number, self._started(number, calls)

    def wait(
        self,
        refs: Sequence[ray.ObjectRef],
        ranks: Sequence[int],
        *,
        number: int,
        timeout_s: float | None,
        grace_s: float,
    ) -> Outcome:
        """Do as `wait_for_ranks`, for a call that `start` has started.

        Args:
            refs: The future of each relay.
            ranks: The ranks that were called.
            number: Of the call.
            timeout_s: Limit in seconds. None: as long as every rank is alive.
            grace_s: Seconds that the other ranks have to finish once one has failed.
        """
        relays = self._relays_of(ranks)
        found, outcome = wait_for_ranks(refs, relays, timeout_s=timeout_s, grace_s=0.0), Outcome()
        if found.failures or found.unfinished:
            # Of which ranks, and what of the others: after the limit as it is, else after the grace
            # that all ranks have from now on.
            self._ask(relays, outcome, number=number, grace_s=grace_s if found.failures else 0.0)
            for index, error in found.failures.items():
                # What a relay cannot tell of its ranks, as it could not read the call, is its own.
                if outcome.failures.keys().isdisjoint(self._ranks[index]):
                    outcome.failures[self._ranks[index][0]] = error
            if outcome.failures or outcome.unfinished:
                return outcome
            # A relay that has nothing to tell has finished meanwhile, or has not begun the call.
            found = wait_for_ranks(refs, relays, timeout_s=_LOOK_S)
        for results in found.results.values():
            outcome.results.update(unpack_result(results))
        outcome.unfinished.extend(rank for rank in ranks if rank not in outcome.results)
        return outcome

    def kill(self) -> None:
        """End the relays."""
        for actor in self._actors:
            ray.kill(actor)

    def _started(self, number: int, calls: Mapping[int, HostCall]) -> Iterator[ray.ObjectRef]:
        lane = next(iter(calls.values())).lane
        for index in self._relays_of(calls):
            start = self._actors[index].start
            call = start if lane is None else start.options(concurrency_group=lane)
            own = {rank: calls[rank] for rank in self._ranks[index] if rank in calls}
            yield call.remote(number, own)

    def _relays_of(self, ranks: Collection[int]) -> list[int]:
        """Return which relays have ranks among these."""
        return sorted({rank // self._fan_out for rank in ranks})

    def _ask(self, relays: Sequence[int], outcome: Outcome, *, number: int, grace_s: float) -> None:
        """Add the failed and the unfinished ranks of a call to the outcome."""
        limit = grace_s + _ANSWER_S
        answers = [
            self._actors[index].report.options(concurrency_group=_REPORTS).remote(number, grace_s)
            for index in relays
        ]
        found = wait_for_ranks(answers, relays, timeout_s=limit, grace_s=limit)
        failed: dict[int, ray.ObjectRef] = {}
        for report in found.results.values():
            outcome.unfinished.extend(report.unfinished)
            failed |= report.failed
        told = wait_for_ranks([*failed.values()], [*failed], timeout_s=_ANSWER_S, grace_s=_ANSWER_S)
        outcome.failures.update(told.failures)
        for index, error in found.failures.items():
            own = self._ranks[index]
            # With its node or alone: its ranks cannot be called any more.
            died = RayActorError(error_msg=f"the relay of ranks {own[0]} to {own[-1]}: {error}")
            outcome.failures.update(dict.fromkeys(own, died))
        for index in found.unfinished:
            outcome.unfinished.extend(self._ranks[index])
