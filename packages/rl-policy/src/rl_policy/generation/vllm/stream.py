"""The driver's side of submissions to engines: which engine samples one, and what has come back.

A submission is handed over by a call that nobody waits for. Each engine with something in flight
has one more call, which waits there until a submission has ended. Their futures are the events that
`collect` waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from rl_interfaces import FinishedSubmission, TicketsLostError

from rl_policy.generation.stream import require_known, require_room
from rl_policy.ray.failures import WorkerDiedError
from rl_policy.ray.worker_group import RayWorkerGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_batched_data import BatchedDataDict

logger = logging.getLogger(__name__)

LANES = ("submit", "collect")
"""The lanes of a worker group that an `EngineStream` uses."""

# A call of an engine where nothing ends in this time returns, and is made anew if it is needed.
_HELD_S = 10.0


class EngineLostError(WorkerDiedError):
    """An engine has died, and with it what it sampled.

    Attributes:
        tickets: Of its submissions, ascending.
    """

    def __init__(self, death: WorkerDiedError, *, tickets: Iterable[int]) -> None:
        super().__init__(death.summary, reason=death.reason, details=str(death))
        self.tickets = sorted(tickets)
        self.add_note(f"the submissions {self.tickets} are lost")


@dataclass(frozen=True, slots=True)
class _Submission:
    data: BatchedDataDict
    arguments: Mapping[str, object]


@dataclass(slots=True)
class _Engine:
    rank: int
    is_alive: bool = True
    rows: dict[int, int] = field(default_factory=dict)
    """Of each ticket that it samples."""
    submissions: dict[int, _Submission] = field(default_factory=dict)
    """Of each ticket, to be sampled by another engine if this one dies."""
    handed_over: dict[ray.ObjectRef[None], int] = field(default_factory=dict)
    """Ticket of each call that hands a submission over."""
    waiting: ray.ObjectRef[Any] | None = None
    """The call that waits for the next submission that ends."""


class EngineStream:
    """Submissions to the engines of a worker group, each to the engine with the fewest rows.

    A plain object of one thread. What a dead engine was sampling is sampled again by the others, if
    the group's ranks stand alone and others are left.

    Args:
        group: Started with `LANES`.
        engine_ranks: The rank of each engine.
        limit: Most rows that are submitted and not collected.
        timeout_s: Limit of `settle` and `cancel`, in seconds.
    """

    def __init__(
        self, group: RayWorkerGroup, *, engine_ranks: Sequence[int], limit: int, timeout_s: float
    ) -> None:
        self._group = group
        self._engines = [_Engine(rank) for rank in engine_ranks]
        self._limit = limit
        self._timeout_s = timeout_s
        self._tickets = count()
        self._finished: dict[int, FinishedSubmission] = {}
        # Of engines that have died, until another engine takes them.
        self._orphans: dict[int, _Submission] = {}

    @property
    def room(self) -> int:
        """Rows that may be submitted now."""
        return self._limit - self._num_in_flight

    @property
    def has_lost_engine(self) -> bool:
        """Whether an engine is known to have died."""
        return not all(engine.is_alive for engine in self._engines)

    @property
    def _num_in_flight(self) -> int:
        finished = sum(each.output.size for each in self._finished.values())
        orphans = sum(each.data.size for each in self._orphans.values())
        return finished + orphans + sum(sum(engine.rows.values()) for engine in self._engines)

    def submit(self, data: BatchedDataDict, **arguments: object) -> int:
        """Give rows to an engine, and return their ticket without waiting for it.

        Args:
            data: The rows.
            arguments: Of the engine's `submit`.
        """
        require_room(data.size, num_in_flight=self._num_in_flight, limit=self._limit)
        self._leave_lost()
        ticket = next(self._tickets)
        self._hand_over(ticket, _Submission(data, arguments))
        return ticket

    def revive(self, rank: int) -> None:
        """Give submissions to an engine again that was started anew."""
        for engine in self._engines:
            if engine.rank == rank:
                self._leave(engine)
                engine.is_alive = True

    def _hand_over(self, ticket: int, submission: _Submission) -> None:
        alive = [engine for engine in self._engines if engine.is_alive]
        if not alive:
            raise TicketsLostError("every engine has died", tickets=[])
        engine = min(alive, key=lambda each: sum(each.rows.values()))
        engine.rows[ticket] = submission.data.size
        if self._group.ranks_stand_alone:
            engine.submissions[ticket] = submission
        call = self._group.submit_to(
            engine.rank,
            "submit",
            ticket,
            submission.data,
            lane="submit",
            **submission.arguments,
        )
        engine.handed_over[call] = ticket

    def _leave_lost(self) -> None:
        """Use engines no more of which another call has shown that they have died."""
        lost, known = set(self._group.lost_ranks), self._known()
        for engine in self._engines:
            if engine.is_alive and engine.rank in lost:
                self._leave(engine)
        if self._group.ranks_stand_alone and not any(each.is_alive for each in self._engines):
            summary, reason = f"every engine of {self._group.name} died", "see the log"
            death = WorkerDiedError(summary, reason=reason, details=reason)
            raise EngineLostError(death, tickets=known)

    def _leave(self, engine: _Engine) -> None:
        """Use an engine no more; what it samples waits for another one, if there is one."""
        engine.is_alive, engine.waiting = False, None
        if self._group.ranks_stand_alone and any(each.is_alive for each in self._engines):
            if engine.rows:
                logger.warning(
                    "%d submissions of rank %d of %s, which has died, are sampled again",
                    len(engine.rows),
                    engine.rank,
                    self._group.name,
                )
            self._orphans |= {ticket: engine.submissions[ticket] for ticket in engine.rows}
        engine.rows.clear()
        engine.submissions.clear()
        engine.handed_over.clear()

    def settle(self) -> None:
        """Wait until the engines have taken all submissions, so that other calls come after them.

        Raises:
            TicketsLostError: One has refused some, or has died.
            TimeoutError: One has not taken them in time.
        """
        self._leave_lost()
        deadline = monotonic() + self._timeout_s
        while waiting := [call for engine in self._engines for call in engine.handed_over]:
            left = deadline - monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"engines of {self._group.name} have not taken {len(waiting)} submissions "
                    f"within {self._timeout_s:.0f} s"
                )
            ray.wait(waiting, num_returns=len(waiting), timeout=left)
            self._check_handed_over()

    def collect(
        self, tickets: Iterable[int] | None = None, *, timeout_s: float
    ) -> list[FinishedSubmission]:
        """Return what has finished, see `GenerationStream.collect`."""
        known = self._known()
        wanted = require_known(known if tickets is None else tickets, known)
        deadline = monotonic() + timeout_s
        while wanted:
            self._leave_lost()
            # Not before: engines refuse them while they pause for new weights.
            for ticket in list(self._orphans):
                self._hand_over(ticket, self._orphans.pop(ticket))
            left = max(0.0, deadline - monotonic())
            ready = [ticket for ticket in wanted if ticket in self._finished]
            # What has arrived is taken along, so that one call does not return them one by one.
            self._receive(wanted, timeout_s=0.0 if ready else left)
            ready = [ticket for ticket in wanted if ticket in self._finished]
            if ready:
                return [self._finished.pop(ticket) for ticket in ready]
            if not left:
                break
        return []

    def put_back(self, finished: Iterable[FinishedSubmission]) -> None:
        """Have the next `collect` return again what one has returned."""
        self._finished |= {each.ticket: each for each in finished}

    def cancel(self, tickets: Iterable[int]) -> None:
        """Abort submissions, see `GenerationStream.cancel`."""
        wanted = set(require_known(tickets, self._known()))
        for ticket in wanted.intersection(self._orphans):
            del self._orphans[ticket]
        for ticket in wanted.intersection(self._finished):
            del self._finished[ticket]
        for engine in self._engines:
            running = sorted(wanted.intersection(engine.rows))
            for ticket in running:
                del engine.rows[ticket]
                engine.submissions.pop(ticket, None)
            if running:
                self._cancel(engine, running)

    def _cancel(self, engine: _Engine, running: Sequence[int]) -> None:
        try:
            call = self._group.submit_to(engine.rank, "cancel", running, lane="submit")
            ray.get(call, timeout=self._timeout_s)
        except GetTimeoutError:
            raise TimeoutError(
                f"rank {engine.rank} of {self._group.name} did not take cancel within "
                f"{self._timeout_s:.0f} s"
            ) from None
        except RayError as error:
            if (failure := self._failure(engine, "cancel", error)) is not None:
                raise failure from error

    def _known(self) -> list[int]:
        running = (ticket for each in self._engines for ticket in each.rows)
        return [*self._finished, *self._orphans, *running]

    def _receive(self, wanted: Sequence[int], *, timeout_s: float) -> None:
        """Wait for the engines that have some of `wanted`, and keep what has ended there."""
        engines = [engine for engine in self._engines if engine.rows.keys() & set(wanted)]
        if not engines:
            return
        for engine in engines:
            if engine.waiting is None:
                engine.waiting = self._group.submit_to(
                    engine.rank, "next_ended", _HELD_S, lane="collect"
                )
        calls = {engine.waiting: engine for engine in engines if engine.waiting is not None}
        events = [*calls, *(call for engine in engines for call in engine.handed_over)]
        ready, _ = ray.wait(events, num_returns=1, timeout=timeout_s)
        if not ready:
            return
        self._check_handed_over()
        # Others that are ready as well are no reason to wait.
        ready, _ = ray.wait([*calls], num_returns=len(calls), timeout=0)
        for call in ready:
            self._keep(calls[call], call)

    def _check_handed_over(self) -> None:
        """Forget the calls that have handed their submission over; raise what others report."""
        for engine in self._engines:
            calls = [*engine.handed_over]
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0) if calls else ([], [])
            for call in ready:
                # None: the engine was found dead by an earlier one.
                ticket = engine.handed_over.pop(call, None)
                if ticket is None:
                    break
                try:
                    ray.get(call)
                except RayError as error:
                    if (refusal := self._refusal(engine, ticket, error)) is not None:
                        raise refusal from error

    def _refusal(self, engine: _Engine, ticket: int, error: RayError) -> Exception | None:
        failure = self._failure(engine, "submit", error)
        if failure is None or isinstance(failure, EngineLostError):
            return failure
        engine.rows.pop(ticket, None)
        engine.submissions.pop(ticket, None)
        return TicketsLostError(
            f"rank {engine.rank} of {self._group.name} has refused the submission {ticket}: "
            f"{failure}",
            tickets=[ticket],
        )

    def _keep(self, engine: _Engine, call: ray.ObjectRef[Any]) -> None:
        engine.waiting = None
        try:
            ended = ray.get(call)
        except RayError as error:
            if (failure := self._failure(engine, "next_ended", error)) is not None:
                raise failure from error
            return
        failures: dict[int, str] = {}
        for each in ended:
            # A cancelled one may have ended before its engine was told.
            if engine.rows.pop(each.key, None) is None:
                continue
            engine.submissions.pop(each.key, None)
            if each.output is None:
                failures[each.key] = each.error
            else:
                self._finished[each.key] = FinishedSubmission(
                    ticket=each.key, output=each.output, finish_reasons=each.finish_reasons
                )
        if failures:
            first = min(failures)
            raise TicketsLostError(
                f"submissions {sorted(failures)} failed on rank {engine.rank} of "
                f"{self._group.name}: {failures[first]}",
                tickets=failures,
            )

    def _failure(self, engine: _Engine, method: str, error: RayError) -> Exception | None:
        """Return what to raise; if the engine has died, it is used no more.

        Returns:
            None if it has died, and others sample what it was sampling.
        """
        failure = self._group.failure_of(engine.rank, method, error)
        if not isinstance(failure, WorkerDiedError):
            return failure
        lost = [*engine.rows]
        self._leave(engine)
        if self._group.ranks_stand_alone and any(each.is_alive for each in self._engines):
            return None
        return EngineLostError(failure, tickets=[*lost, *self._orphans])
