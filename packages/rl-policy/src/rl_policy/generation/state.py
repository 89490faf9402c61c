"""The state of an inference engine: the memory that is on the device, and the weights.

call                      memory needed   weights needed      leads to
generate                  weights, cache  committed           same
sleep                     any             any                 asleep; updating, level 2: lost
wake(tags)                any             any                 these tags awake
begin_update(version)     weights         any, and older      updating
commit_update(version)    weights         updating, received  committed (or is already)
a failed update           -               -                   lost, until a full resend

A staged update is received beside the weights and exchanged with them at its commit: meanwhile
`generate` is allowed, and if it fails the weights are the committed ones as before.

Version and weights are a `rl_refit.protocol.WeightVersion`, the state machine of every receiver;
here "updating" is its "in progress" and "loaded", and "lost" its "poisoned".
"""

from __future__ import annotations

from collections.abc import Sequence

from rl_refit.protocol import State, WeightVersion

INITIAL_VERSION = -1
"""The version of the weights that an engine has loaded by itself, before any refit."""

TAGS = ("weights", "kv_cache")
"""The parts of an engine's memory that can wake separately."""


class EngineStateError(RuntimeError):
    """The engine's state does not allow the call."""


class EngineState:
    """The state of one engine, and the rules of the module's table.

    Args:
        version: Of the weights that the engine has loaded by itself, older than any refit.
    """

    def __init__(self, version: int = INITIAL_VERSION) -> None:
        self._awake: set[str] = set(TAGS)
        self._weights = WeightVersion(committed=version)

    @property
    def version(self) -> int:
        """The committed version."""
        assert self._weights.committed is not None, "it starts with a committed one"
        return self._weights.committed

    @property
    def incoming(self) -> int:
        """The version of the last `begin_update`; the committed one before the first."""
        return self.version if self._weights.begun is None else self._weights.begun

    @property
    def is_committed(self) -> bool:
        """Whether the weights are exactly those of `version`."""
        return self._weights.state is State.READY

    def require_generate(self) -> None:
        """Raise `EngineStateError` unless the engine can sample."""
        if asleep := self.asleep():
            raise EngineStateError(
                f"generate is not allowed while {' and '.join(asleep)} sleep: "
                "call prepare_for_generation() first"
            )
        if self._weights.is_updating and not self._weights.serves:
            raise EngineStateError(
                f"generate is not allowed while weights of version {self.incoming} are on their "
                "way: call commit_update() when all have arrived"
            )
        if self._weights.is_poisoned:
            raise EngineStateError(
                f"generate is not allowed: {self._weights.reason}. Send all weights again, from "
                "begin_update() to commit_update()"
            )

    def sleep(self, *, level: int) -> None:
        """Record that the device's memory is freed; on level 2 the weights are dropped."""
        if self._weights.is_updating:
            self.lose(f"the refit to version {self.incoming} was abandoned for the engine's sleep")
        self._awake.clear()
        if level == 2:
            self.lose("the engine's sleep (generation.vllm_cfg.sleep_level=2) dropped the weights")

    def asleep(self, tags: Sequence[str] | None = None) -> list[str]:
        """Return which of `tags` are asleep; None: of all.

        Raises:
            ValueError: A tag is unknown.
        """
        wanted = TAGS if tags is None else tuple(tags)
        unknown = sorted(set(wanted) - set(TAGS))
        if unknown:
            raise ValueError(f"tags={unknown} are unknown: an engine has {list(TAGS)}")
        return [tag for tag in TAGS if tag in wanted and tag not in self._awake]

    def wake(self, tags: Sequence[str]) -> None:
        """Record that the memory of `tags` is on the device."""
        self._awake.update(tags)

    def require_begin(self, version: int) -> None:
        """Raise unless a refit to `version` may begin.

        Raises:
            EngineStateError: The weights are asleep.
            ValueError: `version` is not newer than the committed one. Nothing changes.
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

    def begin_update(self, version: int, *, staged: bool = False) -> None:
        """Record that a refit to `version` has begun.

        Args:
            version: Of the new weights.
            staged: Whether they are received beside the weights that are sampled from.

        Raises:
            EngineStateError: The weights are asleep.
            ValueError: `version` is not newer than the committed one. Nothing changes.
        """
        self.require_begin(version)
        self._weights.begin(version, staged=staged)

    def start_swap(self) -> None:
        """Record that the staged weights are being exchanged with those that are sampled from."""
        self._weights.start_swap()

    def require_update(self, call: str, version: int) -> None:
        """Raise `EngineStateError` unless a refit to `version` has begun."""
        if not self._weights.is_updating:
            label = "lost" if self._weights.is_poisoned else "committed"
            raise EngineStateError(
                f"{call}({version}) is not allowed while the weights are {label}: "
                f"call begin_update({version}) first"
            )
        if version != self.incoming:
            raise EngineStateError(
                f"{call}({version}) does not belong to begin_update({self.incoming})"
            )

    def receive(self) -> None:
        """Record that all weights are loaded."""
        self._weights.set_loaded()

    def require_commit(self, version: int) -> None:
        """Raise `EngineStateError` unless all weights of `version` are loaded."""
        self.require_update("commit_update", version)
        if not self._weights.is_loaded(version):
            raise EngineStateError(f"commit_update({version}): not all weights have arrived")

    def has_committed(self, version: int) -> bool:
        """Return whether the engine's weights are those of `version`."""
        return self.is_committed and self.version == version

    def commit(self) -> None:
        """Make the loaded weights the committed ones."""
        self._weights.commit(self.incoming)

    def lose(self, reason: str) -> None:
        """Record why the weights are undefined until a full refit."""
        self._weights.poison(reason)
