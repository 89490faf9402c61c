"""Which engines live, join, and take part in an update; and the calls that go to them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rl_policy.generation.vllm.replacement import Replacements
from rl_policy.ray.failures import WorkerDiedError

if TYPE_CHECKING:
    from rl_policy.generation.vllm.engine.vllm_engine import EngineFacts
    from rl_policy.generation.vllm.stream import EngineStream
    from rl_policy.ray.worker_group import RankCall, RayWorkerGroup

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


class Membership:
    """The engines of a worker group, see `rl_policy.refit.EngineMembership`.

    Engines whose ranks stand alone are started anew when they die, and join the others when they
    have the weights that these sample from.

    Args:
        group: The worker group.
        stream: Gets submissions to engines that have joined.
        ranks_per_engine: How many of its ranks each engine has, one after the other.
        timeout_s: Limit of each call, and of each start anew, in seconds.

    Attributes:
        facts: Of each engine.
        addresses: The sender's for each receiver; empty before `init_transfer`.
        has_initial_weights: Whether the engines sample from the weights that they load by
            themselves, which those that are started anew then have too.
    """

    def __init__(
        self,
        group: RayWorkerGroup,
        stream: EngineStream,
        *,
        ranks_per_engine: int,
        timeout_s: float,
    ) -> None:
        self._group = group
        self._stream = stream
        self._ranks_per_engine = ranks_per_engine
        self._timeout_s = timeout_s
        self._replacements = Replacements(
            group, ranks_per_engine=ranks_per_engine, start_timeout_s=timeout_s
        )
        self._changing = threading.RLock()
        # Of the update that has begun: how often each of its ranks had died before.
        self._updated: dict[int, int] | None = None
        self.addresses: list[Mapping[str, object]] = []
        self.has_initial_weights = True
        self.facts: list[EngineFacts] = self.on_all("describe")

    # Who is there

    @property
    def num_losses(self) -> int:
        """See `EngineMembership`."""
        return sum(self._group.num_deaths)

    @property
    def num_replaced(self) -> int:
        """See `EngineMembership`."""
        return self._replacements.num_replaced

    @property
    def is_usable(self) -> bool:
        """See `EngineMembership`."""
        return self._group.ranks_stand_alone and not self._group.has_ended

    @property
    def has_joined(self) -> bool:
        """See `EngineMembership`."""
        self.advance()
        return bool(self.joining)

    @property
    def receivers(self) -> list[int] | None:
        """See `EngineMembership`."""
        return list(self._updated or []) if self.num_losses else None

    @property
    def alive(self) -> list[int]:
        """The engines that calls go to."""
        per_engine = self._ranks_per_engine
        return [rank // per_engine for rank in self._group.ranks if rank % per_engine == 0]

    @property
    def joining(self) -> list[int]:
        """The engines that run and have not received weights yet."""
        return list(self._replacements.joining)

    def ranks_of(self, engines: Iterable[int]) -> list[int]:
        """Return the ranks of some engines, ascending."""
        return self._replacements.ranks_of(engines)

    def advance(self) -> None:
        """Start engines anew that have died; let those sample that need no weights.

        Raises:
            Exception: Several starts of an engine have failed, see `Replacements.advance`.
        """
        if not self.is_usable:
            return
        with self._changing:
            self._replacements.advance()
            joining = self.joining
            if self.has_initial_weights and joining:
                # They have loaded by themselves what the others sample from.
                if self.addresses:
                    self.connect(self.ranks_of(joining), self.addresses)
                self.restore(joining)

    def restore(self, joined: Sequence[int]) -> None:
        """Give work to engines that have joined and hold the weights."""
        if not joined:
            return
        with self._changing:
            self._replacements.restore(joined)
            for engine in joined:
                rank = self.ranks_of([engine])[0]
                try:
                    (self.facts[engine],) = self.on_ranks([rank], "describe")
                except WorkerDiedError:
                    # It is lost again, and started anew by the next `advance`.
                    if not self.is_usable:
                        raise
                    continue
                self._stream.revive(rank)

    # Who takes part in an update

    def open_update(self, ranks: Iterable[int], *, deaths: Sequence[int]) -> None:
        """Note who takes part in an update that has begun.

        Args:
            ranks: Those that do.
            deaths: How often each rank of all had died before it began.
        """
        self._updated = {rank: deaths[rank] for rank in sorted(ranks)}

    @property
    def updated(self) -> list[int]:
        """The ranks of the update that has begun; without one, those that calls go to."""
        return self._group.ranks if self._updated is None else list(self._updated)

    @property
    def left_of_update(self) -> list[int]:
        """Those of them that live, as far as it is known."""
        if self._updated is None:
            return self._group.ranks
        deaths = self._group.num_deaths
        return [rank for rank, before in self._updated.items() if deaths[rank] == before]

    def on_updated(self, method: str, *args: object, without: Sequence[int] = ()) -> list[Any]:
        """Call `method` on the ranks of the update, and again without those that die."""
        while True:
            ranks = [rank for rank in self.left_of_update if rank not in without]
            try:
                return self.on_ranks(ranks, method, *args)
            except WorkerDiedError as death:
                # Bounded: each time there is one rank less.
                if not self.is_usable or set(ranks) <= set(self.left_of_update):
                    raise
                logger.warning("%s: the update goes on without it", death.summary)

    # Calls

    def connect(self, ranks: Sequence[int], addresses: Sequence[Mapping[str, object]]) -> None:
        """Set the senders of some ranks' receivers.

        Args:
            ranks: Of the engines.
            addresses: The sender's address for each receiver of every engine.
        """
        self.on_ranks(ranks, "init_transfer", addresses, timeout_s=self._timeout_s)

    def on_all(self, method: str, *args: object, **kwargs: object) -> list[Any]:
        """Call `method` on every engine, after `generate`; return one result per engine."""
        call = self._group.submit_all(method, *args, **kwargs)
        return self.of_engines(call, self._group.wait(call, timeout_s=self._timeout_s))

    def on_all_beside(self, method: str, *args: object, **kwargs: object) -> list[Any]:
        """Do as `on_all`, also while `generate` runs."""
        return self.on_ranks(self._group.ranks, method, *args, **kwargs)

    def on_ranks(
        self, ranks: Sequence[int], method: str, *args: object, **kwargs: object
    ) -> list[Any]:
        """Do as `on_all_beside`, on some ranks."""
        call = self._group.submit_beside_on(ranks, method, *args, **kwargs)
        return self.of_engines(call, self._group.wait(call, timeout_s=self._timeout_s))

    def of_engines(self, call: RankCall, results: Sequence[ResultT]) -> list[ResultT]:
        """Return the results of the ranks with an engine, the first of each."""
        # By rank, as some ranks of an engine may be lost before the others are.
        return [
            result
            for rank, result in zip(call.result_ranks, results, strict=True)
            if rank % self._ranks_per_engine == 0
        ]
