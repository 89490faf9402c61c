"""The commit protocol: a refit is a transaction over one sender and all of its receivers.

Messages in order, S from the sender and R from each receiver. Once per connection:

    S  Offer, then the buffers' file descriptors
    R  Accepted         it accepts the plan and has opened the buffers
    S  Join             all have accepted; the transport's sides join each other

and for each refit:

    S  Begin(v)
    R  Ready(v, b, h)   only if `begin(v)` was called; it holds a copy of version b, and the base h
    S  Start(v)         all are ready; from here on a lost connection fails or drops
    S  Filled(v, k)     for each bucket k, at most `num_buffers` ahead of `Loaded`
    R  Loaded(v, k)
    S  End(v)
    R  Done(v)          all buckets are loaded and verified by this receiver
    S  AllLoaded(v)     ... and by every other receiver of this sender
    S  Commit(v)        later, from `RefitSender.commit(v)`; has no reply

Either side may send `Failure` in place of its next message, and then closes the connection. A side
that receives a message out of order fails. The sender fails a refit on the first `Failure` or lost
connection, reports it to the other receivers and drops all connections, so that the next refit
starts on new ones without unread messages. Before `Start`, a receiver whose connection is dropped
reconnects and waits. If a new receiver of a known rank connects before `Start`, the sender drops
all connections in the same way.

A sender with `min_receivers` drops a receiver that is lost, as long as so many are left: one whose
connection ended, or that was silent for too long. It sends it a `Failure`, closes its channel and
waits for it no more; a dropped receiver never gets `AllLoaded`, so that it cannot commit, and
learns that it is behind when it reads on. `Commit` is sent to nobody unless enough receivers are
connected. A dropped receiver takes part again if it has connected before `Begin`, or if the refit
is to it: `RefitSender.send(v, receivers=ranks)` has connections to these ranks alone, so that one
that joins gets the version that the others have, while these serve. Whose connections are closed
for it connects again with its next refit.

A sender with `delta=True` and its receivers keep a copy of the version that all of them have
loaded, as long as the connections last. If every `Ready` names the version of the sender's own
copy, `Start` says that buckets may arrive as patches of it, see `rl_refit.delta`; otherwise, as
after a failure or with a new receiver, all buckets are sent in full. The digest of a `Filled` is
that of the full bucket in either case.

A sender with adapters sends their base first and the adapters behind it, in buckets of their own.
Every engine that has loaded all of them names the digest of the base in its next `Ready`, also on a
new connection. If all name that of the sender, `Start` may say that the buckets begin with those of
adapters; whether they do is decided before the refit, as trainer ranks without receivers have to
know it too. An engine that lacks the base fails such a refit.

States of a receiver, held by `WeightVersion`, the only owner of its version:

    state        the engine's weights are          require_ready()    leaves by
    empty        not from this sender              RefitError         begin
    in progress  old ones, or partly overwritten   RefitInProgress    AllLoaded: loaded
    loaded       those of v, not yet valid         RefitInProgress    commit(v): ready
    ready        those of the committed version    returns it         begin
    poisoned     undefined                         PoisonedError      begin

`begin(v)` leads from every state to "in progress", if v is newer than the committed version. A
failure on either side leads from "in progress" and "loaded" to "poisoned", and only a complete
refit leads out of it.

A *staged* refit, `begin(v, staged=True)` in state "ready" or "empty", is received beside the
engine's weights and swapped with them at its commit. The table then changes:

    state        the engine's weights are          require_ready()      leaves by
    in progress  those of the committed version    returns it           AllLoaded: loaded
    loaded       those of the committed version    returns it           swap: swapping
    swapping     partly exchanged                  RefitInProgress      commit(v): ready

A failure leads from "in progress" and "loaded" back to where `begin` came from, and only from
"swapping" to "poisoned". The messages are the same: the sender does not know which receivers stage.

`commit(v)` comes from the sender's `Commit` or from the engine itself,
through `RefitReceiver.commit`: the first one counts, the second changes nothing. After a failure
the committed version is still known, but its weights are overwritten.

The sender's only state is the version that was last sent in full: `RefitSender.commit` refuses any
other. A failed `send` clears it.
"""

from __future__ import annotations

from enum import Enum
from typing import NoReturn

from rl_refit.errors import PoisonedError, RefitError, RefitInProgress, StaleVersionError


class State(Enum):
    """The state of an engine's weights; see the module's table."""

    EMPTY = "empty"
    IN_PROGRESS = "in progress"
    LOADED = "loaded"
    SWAPPING = "swapping"
    READY = "ready"
    POISONED = "poisoned"


_UPDATING = (State.IN_PROGRESS, State.LOADED, State.SWAPPING)


class WeightVersion:
    """The version and state of one engine's weights.

    Args:
        rank: The receiver's rank, for error messages; None if there is only one.
        committed: The version of the weights that the engine starts with; None if it has none.

    Attributes:
        committed: The committed version; None before the first.
        begun: The version of the last `begin`.
        state: See the module's table.
        reason: Why the last refit failed; in state "poisoned", why the weights are undefined.
        is_staged: Whether the refit that has begun leaves the engine's weights as they are.
    """

    def __init__(self, rank: int | None = None, *, committed: int | None = None) -> None:
        self.committed = committed
        self.begun: int | None = None
        self.state = State.EMPTY if committed is None else State.READY
        self.reason = ""
        self.is_staged = False
        self._rank = rank

    @property
    def is_updating(self) -> bool:
        """Whether a refit has begun and is neither committed nor failed."""
        return self.state in _UPDATING

    @property
    def serves(self) -> bool:
        """Whether the engine's weights are exactly those of the committed version."""
        # Each once, and in this order: a failure, of the thread that receives, changes the state
        # first.
        is_staged, state = self.is_staged, self.state
        is_intact = state is State.READY or (state in _UPDATING and is_staged)
        return is_intact and self.committed is not None

    @property
    def is_poisoned(self) -> bool:
        """Whether the weights are undefined, for `reason`."""
        return self.state is State.POISONED

    def begin(self, version: int, *, staged: bool = False) -> None:
        """Open a refit.

        Args:
            version: Of the new weights.
            staged: Whether they are received beside the engine's own. This changes nothing for an
                engine whose own weights are undefined.

        Raises:
            StaleVersionError: The version is not newer than the committed one. Nothing changes.
        """
        if self.committed is not None and version <= self.committed:
            raise StaleVersionError(
                f"version {version} is not newer than the committed {self.committed}",
                rank=self._rank,
            )
        # From every state, also from poisoned: only a complete refit heals, and this starts one.
        is_intact = self.state in (State.EMPTY, State.READY) or (
            self.is_updating and self.is_staged
        )
        self.is_staged = staged and is_intact
        self.begun = version
        self.state = State.IN_PROGRESS

    def require_begun(self, version: int) -> None:
        """Raise `RefitError` unless `version` is in progress."""
        if self.state is not State.IN_PROGRESS or self.begun != version:
            raise RefitError(
                f"version {version} was not begun ({self}): call begin", rank=self._rank
            )

    def set_loaded(self) -> None:
        """Record that every receiver of the sender has loaded the version."""
        self.state = State.LOADED

    def is_loaded(self, version: int) -> bool:
        """Return whether `version` is loaded and can be committed."""
        return self.state is State.LOADED and self.begun == version

    def start_swap(self) -> None:
        """Record that the loaded version is being exchanged with the engine's weights."""
        self.is_staged = False
        self.state = State.SWAPPING

    def require_loaded(self, version: int) -> None:
        """Raise unless `version` can be committed, see `commit`."""
        if self.is_poisoned:
            self._refuse()
        if not self.is_loaded(version):
            raise RefitError(f"version {version} cannot be committed: {self}", rank=self._rank)

    def is_committed(self, version: int) -> bool:
        """Return whether the engine's weights are those of `version`, and no refit has begun."""
        return self.state is State.READY and self.committed == version

    def commit(self, version: int) -> bool:
        """Make the loaded version the committed one; return False if it is already.

        Raises:
            PoisonedError: The refit failed.
            RefitError: `version` is not loaded.
        """
        # Both the sender's message and the engine may commit the same version.
        if self.is_committed(version):
            return False
        if self.state is not State.SWAPPING or self.begun != version:
            self.require_loaded(version)
        self.is_staged = False
        self.committed = version
        self.state = State.READY
        return True

    def poison(self, reason: str) -> None:
        """Record why the weights are undefined until a complete refit succeeds.

        A refit that was staged has not touched them: the committed version stays ready.
        """
        before = State.EMPTY if self.committed is None else State.READY
        self.state = before if self.is_staged else State.POISONED
        self.is_staged = False
        self.reason = reason

    def require_ready(self) -> int:
        """Return the committed version, if the engine holds exactly its weights.

        Raises:
            PoisonedError: The last refit failed.
            RefitInProgress: A refit has begun and is not committed.
            RefitError: No version was committed yet.
        """
        if self.is_poisoned:
            self._refuse()
        if self.is_updating and not self.serves:
            raise RefitInProgress(str(self), rank=self._rank)
        if self.committed is None:
            raise RefitError("no version was committed yet", rank=self._rank)
        return self.committed

    def __str__(self) -> str:
        if self.is_poisoned:
            return f"the last refit failed: {self.reason}"
        return f"state {self.state.value}, begun {self.begun}, committed {self.committed}"

    def _refuse(self) -> NoReturn:
        message = f"{self}; the weights are undefined until a complete refit succeeds"
        raise PoisonedError(message, rank=self._rank)
