"""What an inference engine may do now, as an explicit state: its memory, and its weights.

call                      memory needed   weights needed      leads to
generate                  weights, cache  committed           same
sleep                     any             any                 asleep; updating, level 2: lost
wake(tags)                any             any                 these tags awake
begin_update(version)     weights         any, and older      updating
commit_update(version)    weights         updating, received  committed (or is already)
a failed update           -               -                   lost, until a full resend
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

INITIAL_VERSION = -1
"""The version of the weights that an engine has loaded by itself, before any refit."""

TAGS = ("weights", "kv_cache")
"""The parts of an engine's memory that wake on their own."""


class EngineStateError(RuntimeError):
    """A call came in a state that does not allow it."""


class WeightState(Enum):
    """What the weights are."""

    COMMITTED = "committed"
    """Whole, of one version."""
    UPDATING = "updating"
    """A refit is in flight."""
    LOST = "lost"
    """A refit failed or the memory was given away: nothing may be sampled from them."""


class EngineState:
    """The state of one engine, and the rules of the module's table."""

    def __init__(self) -> None:
        self.version = INITIAL_VERSION
        self.weights = WeightState.COMMITTED
        self.has_received = False
        self._awake: set[str] = set(TAGS)
        self._why_lost = ""
        self.incoming = INITIAL_VERSION

    def require_generate(self) -> None:
        """Raise `EngineStateError` unless the engine may sample."""
        asleep = self.asleep()
        if asleep:
            raise EngineStateError(
                f"generate is not allowed while {' and '.join(asleep)} sleep: "
                "call prepare_for_generation() first"
            )
        if self.weights is WeightState.UPDATING:
            raise EngineStateError(
                f"generate is not allowed while weights of version {self.incoming} are on their "
                "way: call commit_update() when all have arrived"
            )
        if self.weights is WeightState.LOST:
            raise EngineStateError(
                f"generate is not allowed: {self._why_lost}. Send all weights again, from "
                "begin_update() to commit_update()"
            )

    def sleep(self, *, level: int) -> None:
        """Record that memory was given away; on level 2 the weights are gone for good."""
        if self.weights is WeightState.UPDATING:
            self.lose(f"the refit to version {self.incoming} was given up for the engine's sleep")
        self._awake.clear()
        if level == 2:
            self.lose("the engine's sleep (generation.vllm_cfg.sleep_level=2) dropped the weights")

    def asleep(self, tags: Sequence[str] | None = None) -> list[str]:
        """Return which of `tags`, or None for all, sleep.

        Raises:
            ValueError: A tag is unknown.
        """
        wanted = TAGS if tags is None else tuple(tags)
        unknown = sorted(set(wanted) - set(TAGS))
        if unknown:
            raise ValueError(f"tags={unknown} are unknown: an engine has {list(TAGS)}")
        return [tag for tag in TAGS if tag in wanted and tag not in self._awake]

    def wake(self, tags: Sequence[str]) -> None:
        """Record that the memory behind `tags` is there."""
        self._awake.update(tags)

    def begin_update(self, version: int) -> None:
        """Record that weights of `version` are coming.

        Raises:
            EngineStateError: The weights sleep.
            ValueError: `version` is not newer than what the engine has.
        """
        if "weights" not in self._awake:
            raise EngineStateError(
                "begin_update is not allowed while the weights sleep: "
                'call prepare_for_generation(tags=["weights"]) first'
            )
        if version <= self.version:
            raise ValueError(
                f"version={version} is not newer than version {self.version}, which the engine has"
            )
        self.weights = WeightState.UPDATING
        self.has_received = False
        self.incoming = version

    def require_update(self, call: str, version: int) -> None:
        """Raise `EngineStateError` unless weights of `version` are on their way."""
        if self.weights is not WeightState.UPDATING:
            raise EngineStateError(
                f"{call}({version}) is not allowed while the weights are {self.weights.value}: "
                f"call begin_update({version}) first"
            )
        if version != self.incoming:
            raise EngineStateError(
                f"{call}({version}) does not belong to begin_update({self.incoming})"
            )

    def receive(self) -> None:
        """Record that all weights have arrived."""
        self.has_received = True

    def require_commit(self, version: int) -> None:
        """Raise `EngineStateError` unless weights of `version` have arrived in full."""
        self.require_update("commit_update", version)
        if not self.has_received:
            raise EngineStateError(f"commit_update({version}): not all weights have arrived")

    def has_committed(self, version: int) -> bool:
        """Return whether the engine's weights are those of `version`."""
        return self.weights is WeightState.COMMITTED and self.version == version

    def commit(self) -> None:
        """Record that the weights that arrived are the engine's own."""
        self.version = self.incoming
        self.weights = WeightState.COMMITTED
        self.has_received = False

    def lose(self, reason: str) -> None:
        """Record why nothing may be sampled from the weights any more."""
        self.weights = WeightState.LOST
        self._why_lost = reason
