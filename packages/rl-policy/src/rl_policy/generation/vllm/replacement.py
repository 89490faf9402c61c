"""Engines whose process has ended are started anew, while the others go on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rl_policy.ray.worker_group import RayWorkerGroup

logger = logging.getLogger(__name__)

_MOST_FAILURES = 5
"""Starts of one engine that may fail, one after the other."""


class Replacements:
    """The engines of a worker group whose ranks stand alone.

    An engine is lost, then starting, then *joining*: it runs and has none of the trainer's weights.
    `restore` ends that, after a refit.

    Args:
        group: The worker group.
        ranks_per_engine: How many of its ranks each engine has, one after the other.

    Attributes:
        num_replaced: Engines that were started anew.
        joining: Engines that run and lack weights.
    """

    def __init__(self, group: RayWorkerGroup, *, ranks_per_engine: int) -> None:
        self._group = group
        self._ranks_per_engine = ranks_per_engine
        self._starting: dict[int, list[ray.ObjectRef[None]]] = {}
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
            Exception: An engine could not be started several times.
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
        self._starting[engine] = [self._group.replace(rank) for rank in ranks]
        self._deaths_before[engine] = self._deaths(ranks)
        self.num_replaced += 1
        logger.warning("engine %d of %s has died and is started anew", engine, self._group.name)

    def _note_start(self, engine: int) -> None:
        starting = self._starting[engine]
        ready, _ = ray.wait(starting, num_returns=len(starting), timeout=0)
        if len(ready) < len(starting):
            return
        del self._starting[engine]
        ranks = self.ranks_of([engine])
        for rank, start in zip(ranks, starting, strict=True):
            try:
                ray.get(start)
            except RayError as error:
                failures = self._failures[engine] = self._failures.get(engine, 0) + 1
                if failures >= _MOST_FAILURES:
                    raise self._group.failure_of(rank, "__init__", error) from error
                logger.warning("engine %d did not start, and is started again: %s", engine, error)
                self._start(engine, ranks)
                return
        self.joining.append(engine)

    def _deaths(self, ranks: Iterable[int]) -> int:
        return sum(self._group.num_deaths[rank] for rank in ranks)
