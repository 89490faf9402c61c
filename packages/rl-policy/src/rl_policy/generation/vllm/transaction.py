"""The driver's side of new weights: a version is opened on all engines, received, and committed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rl_refit.vllm import KvCache

    from rl_policy.generation.vllm.membership import Membership
    from rl_policy.generation.vllm.stream import EngineStream
    from rl_policy.ray.worker_group import RankCall, RayWorkerGroup

logger = logging.getLogger(__name__)

Staging = Literal["auto", "host", "off"]
"""Where engines receive new weights while they sample; see `VllmGeneration.begin_update`."""

# A receiver that times out by itself reports why, which the driver should receive.
_MARGIN_S = 10.0


class UpdateTransaction:
    """Updates of the engines' weights, one after the other; see the calls of `VllmGeneration`.

    Args:
        group: The engines' worker group.
        members: Who of them takes part.
        stream: What they sample for.
        has_adapters: Whether they get adapters apart from the weights.
        timeout_s: Limit of each call, in seconds.
        generate_timeout_s: Limit of requests that an engine has to end first.
    """

    def __init__(
        self,
        group: RayWorkerGroup,
        members: Membership,
        stream: EngineStream,
        *,
        has_adapters: bool,
        timeout_s: float,
        generate_timeout_s: float,
    ) -> None:
        self._group = group
        self._members = members
        self._stream = stream
        self._has_adapters = has_adapters
        self._timeout_s = timeout_s
        self._generate_timeout_s = generate_timeout_s
        # Engines that have joined, of the update that has begun.
        self._catching_up: list[int] = []

    def begin(self, version: int, *, staging: Staging, kv_cache: KvCache) -> None:
        """Open a transaction on every engine, see `VllmGeneration.begin_update`."""
        # With adapters, `holds_base` has decided who takes part.
        if not self._has_adapters:
            self._members.advance()
        place = self._find_place(version, staging)
        if place is None:
            # Engines that pause end first what was submitted before.
            self._stream.settle()
        serving, deaths = self._group.ranks, list(self._group.num_deaths)
        call = self._group.submit_beside("begin_update", version, place=place, kv_cache=kv_cache)
        # An engine without room ends its requests first.
        self._group.wait(call, timeout_s=self._timeout_s + self._generate_timeout_s)
        joining = self._begin_joining(version)
        self._members.open_update([*serving, *joining], deaths=deaths)

    def begin_catch_up(self, version: int) -> None:
        """Open a transaction on the engines that have joined."""
        deaths = list(self._group.num_deaths)
        self._members.open_update(self._begin_joining(version), deaths=deaths)

    def _begin_joining(self, version: int) -> list[int]:
        """Open a transaction on engines that have joined; return their ranks."""
        self._catching_up = self._members.joining
        ranks = self._members.ranks_of(self._catching_up)
        if ranks:
            self._members.connect(ranks, self._members.addresses)
            self._members.on_ranks(ranks, "begin_update", version)
        return ranks

    def submit(self, version: int) -> RankCall:
        """Start to receive and load all weights on the engines that take part."""
        return self._group.submit_beside_on(self._members.updated, "update", version)

    def wait(self, call: RankCall) -> list[dict[str, float]]:
        """Wait for a call of `submit`; return a report per receiver, or raise its root failure."""
        results = self._group.wait(call, timeout_s=self._timeout_s + _MARGIN_S)
        return [report for reports in self._members.of_engines(call, results) for report in reports]

    def commit(self, version: int) -> None:
        """Let the engines that take part sample from the loaded weights."""
        members = self._members
        # What some have committed stays, whoever dies meanwhile.
        members.on_updated("commit_update", version)
        living = set(members.left_of_update)
        self._catching_up = [
            each for each in self._catching_up if living.issuperset(members.ranks_of([each]))
        ]
        members.restore(self._catching_up)

    def metrics(self) -> dict[str, float]:
        """Return `refit_pause_s` and `refit_staged`, see `VllmGeneration.update_metrics`."""
        # Those that have joined have sampled nothing that they could have paused.
        joined = self._members.ranks_of(self._catching_up)
        reports = self._members.on_updated("update_metrics", without=joined)
        return {
            "refit_pause_s": max((each["refit_pause_s"] for each in reports), default=0.0),
            "refit_staged": min((each["refit_staged"] for each in reports), default=1.0),
        }

    def _find_place(self, version: int, staging: Staging) -> str | None:
        """Return where all engines stage; None if they pause, as some would refuse requests."""
        if staging == "off":
            return None
        engines = self._members.alive
        ranks = [self._members.ranks_of([engine])[0] for engine in engines]
        rooms = self._members.on_ranks(ranks, "find_room", only_host=staging == "host")
        for engine, (place, reason) in zip(engines, rooms, strict=True):
            if place is None:
                reason = f"engine {engine}: {reason}"
                if staging == "host":
                    raise ValueError(f'staging="host" is not possible: {reason}')
                logger.info("engines pause for version %d, as none is staged: %s", version, reason)
                return None
        return "host" if any(place == "host" for place, _ in rooms) else "device"
