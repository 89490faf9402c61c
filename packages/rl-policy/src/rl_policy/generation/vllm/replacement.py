"""Engines whose process has ended are started anew, while the others go on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rl_policy.ray.worker_group import RayWorkerGroup

logger = logging.getLogger(__name__)

_MOST_FAILURES = 5
"""Starts of one engine that may fail, one after the other."""


@dataclass(frozen=True, slots=True)
class _Start:
    constructions: list[ray.ObjectRef[None]]
    """Of each rank of the engine."""
    deadline: float
    """When it has failed, by the monotonic clock."""


class Replacements:
    """The engines of a worker group whose ranks stand alone.

    An engine is lost, then starting, then *joining*: it runs and has none of the trainer's weights.
    `restore` ends that, after a refit. A start that fails, or takes too long, is repeated some
    times.

    Args:
        group: The worker group.
        ranks_per_engine: How many of its ranks each engine has, one after the other.
        start_timeout_s: Limit of each start, in seconds. It is noticed by `advance`.

    Attributes:
        num_replaced: Engines that were started anew.
        joining: Engines that run and lack weights.
    """

    def __init__(
        self, group: RayWorkerGroup, *, ranks_per_engine: int, start_timeout_s: float
    ) -> None:
        self._group = group
        self._ranks_per_engine = ranks_per_engine
        self._start_timeout_s = start_timeout_s
        self._starting: dict[int, _Start] = {}
        # Deaths of an engine's ranks when it was started anew.
        self._deaths_before: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        self.num_replaced = 0
        self.joining: list[int] = []

    def ranks_of(self, engines: Iterable[int]) -> list[int]:
        """Return the ranks of some engines, ascending."""
        count = self._ranks_per_engine
        return [each * count + place for each in sorted(engines) for place in range(count)]

    def advance(self) -> None:
        """Start what was lost since the last call, and note what has started.

        Raises:
            TimeoutError: Several starts of an engine took too long, the last one too.
            Exception: Several starts of an engine failed; what the last one raised.
        """
        group = self._group
        if group.has_ended or not group.lost_ranks:
            return
        for engine in sorted({rank // self._ranks_per_engine for rank in group.lost_ranks}):
            ranks = self.ranks_of([engine])
            if self._deaths(ranks) > self._deaths_before.get(engine, 0):
                self._start(engine, ranks)
        for engine in list(self._starting):
            self._note_start(engine)

    def restore(self, engines: Iterable[int]) -> None:
        """Let calls go to engines that have received weights."""
        restored = set(engines)
        self._group.restore(self.ranks_of(restored))
        self.joining = [each for each in self.joining if each not in restored]
        for engine in restored:
            self._failures.pop(engine, None)

    def _start(self, engine: int, ranks: list[int]) -> None:
        self.joining = [each for each in self.joining if each != engine]
        # The processes of an engine end together.
        self._group.lose(set(ranks).difference(self._group.lost_ranks))
        if self._group.has_ended:
            return
        constructions = [self._group.replace(rank) for rank in ranks]
        self._starting[engine] = _Start(constructions, monotonic() + self._start_timeout_s)
        self._deaths_before[engine] = self._deaths(ranks)
        self.num_replaced += 1
        logger.warning("engine %d of %s has died and is started anew", engine, self._group.name)

    def _note_start(self, engine: int) -> None:
        start = self._starting[engine]
        running, num_ranks = start.constructions, len(start.constructions)
        ready, _ = ray.wait(running, num_returns=num_ranks, timeout=0)
        if len(ready) < num_ranks and monotonic() < start.deadline:
            return
        del self._starting[engine]
        failure = self._failure(engine, start, ready)
        if failure is None:
            self.joining.append(engine)
        else:
            self._start_again(engine, failure)

    def _failure(
        self, engine: int, start: _Start, ready: list[ray.ObjectRef[None]]
    ) -> Exception | None:
        """Return why an engine has not started, None if it has."""
        ranks = dict(zip(start.constructions, self.ranks_of([engine]), strict=True))
        for construction in ready:
            try:
                ray.get(construction)
            except RayError as error:
                return self._group.failure_of(ranks[construction], "__init__", error)
        late = sorted(ranks[each] for each in start.constructions if each not in ready)
        if late:
            return TimeoutError(
                f"engine {engine}: ranks {late} of {self._group.name} did not start again within "
                f"{self._start_timeout_s:.0f} s"
            )
        return None

    def _start_again(self, engine: int, failure: Exception) -> None:
        ranks = self.ranks_of([engine])
        failures = self._failures[engine] = self._failures.get(engine, 0) + 1
        if failures >= _MOST_FAILURES:
            self._group.end_lost(ranks)
            # Those of its last start are no reason for another one.
            self._deaths_before[engine] = self._deaths(ranks)
            raise failure
        logger.warning(
            "engine %d did not start, and is started again: %s", engine, failure, exc_info=failure
        )
        self._start(engine, ranks)

    def _deaths(self, ranks: Iterable[int]) -> int:
        return sum(self._group.num_deaths[rank] for rank in ranks)
