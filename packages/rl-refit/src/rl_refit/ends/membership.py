"""Which receivers a sender counts on, and which version each of them has loaded."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from rl_refit.errors import RefitError


class Membership:
    """The receivers of a sender, over all of its refits.

    One that is lost is *dropped*: refits go on without it until it connects again, as long as
    `min_receivers` hold the version. Those that a refit leaves out count as holders if they have
    loaded the same version before.

    Args:
        num_receivers: Receivers in all.
        min_receivers: How many have to hold a version before it is committed. None: all.
        timeout_s: Limit of one refit, in seconds.
        receiver_timeout_s: Seconds of silence after which one is lost. None: half of `timeout_s`.
        per_engine: Receivers of one engine, of consecutive ranks; if one is lost, all of them are.

    Attributes:
        dropped: Why each receiver was dropped, by rank.
        silence_s: Seconds of silence after which one is lost.
        per_engine: Receivers of one engine.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        num_receivers: int,
        *,
        min_receivers: int | None,
        timeout_s: float,
        receiver_timeout_s: float | None,
        per_engine: int = 1,
    ) -> None:
        # A trainer rank without receivers has the arguments of those that have some.
        most = max(num_receivers, 1)
        least = most if min_receivers is None else min_receivers
        if not 1 <= least <= most:
            raise ValueError(
                f"min_receivers={min_receivers} is not between 1 and num_receivers={num_receivers}"
            )
        silence_s = timeout_s / 2 if receiver_timeout_s is None else receiver_timeout_s
        if not 0 < silence_s <= timeout_s:
            raise ValueError(
                f"receiver_timeout_s={receiver_timeout_s} is not between 0 and "
                f"timeout_s={timeout_s}"
            )
        if per_engine < 1 or num_receivers % per_engine:
            raise ValueError(
                f"num_receivers={num_receivers} is no multiple of receivers_per_engine={per_engine}"
            )
        self.silence_s = silence_s
        self.per_engine = per_engine
        self.dropped: dict[int, str] = {}
        self._num_receivers = num_receivers
        self._least = least
        self._known: set[int] = set()
        self._loaded: dict[int, int] = {}

    @property
    def patience_s(self) -> float:
        """How long to wait for a receiver that may be missing, in seconds."""
        return self.silence_s if self._least < self._num_receivers else math.inf

    @property
    def num_dispensable(self) -> int:
        """How many receivers may be lost."""
        return self._num_receivers - self._least

    @property
    def num_expected(self) -> int:
        """How many receivers a refit waits for, if it names none."""
        return self._num_receivers - len(self.dropped)

    def least_of(self, version: int, ranks: Collection[int] | None) -> int:
        """Return how many receivers of a refit have to load the version, at least one.

        Args:
            version: Of the refit.
            ranks: Of the receivers that take part; None for all.

        Raises:
            RefitError: They are too few, together with others that hold the version.
        """
        others = 0 if ranks is None else len(self._holders(version) - set(ranks))
        if ranks is not None and len(ranks) + others < self._least:
            raise RefitError(
                f"receivers={sorted(ranks)} and {others} others that hold version {version} are "
                f"fewer than min_receivers={self._least}"
            )
        return max(1, self._least - others)

    def connect(self, ranks: Iterable[int]) -> None:
        """Record who is connected, and so takes part again, with the others of its engine."""
        for rank in ranks:
            self._known.add(rank)
            for fellow in engine_of(rank, self.per_engine):
                if self.dropped.pop(fellow, None) is not None:
                    # Its process may be a new one, which has loaded nothing.
                    self._loaded.pop(fellow, None)

    def drop_missing(self, ranks: Collection[int], *, wanted: Collection[int] | None) -> None:
        """Drop the engines of those that have not connected in time.

        Args:
            ranks: Of those that have.
            wanted: Of those that were waited for; None for all that were not dropped before.
        """
        reason = f"no connection within {self.silence_s:g} s"
        if wanted is not None:
            missing = sorted(set(wanted) - set(ranks))
        else:
            # Ranks are known once they have connected; those that never have are counted from 0.
            candidates = [*sorted(self._known), *range(self._num_receivers)]
            absent = [each for each in dict.fromkeys(candidates) if each not in ranks]
            new = [each for each in absent if each not in self.dropped]
            missing = new[: self.num_expected - len(ranks)]
        for rank in missing:
            self.dropped[rank] = reason
            for fellow in engine_of(rank, self.per_engine):
                self.dropped.setdefault(fellow, lost_with(rank, reason))

    def require_enough(self, version: int, alive: Collection[int], gone: Collection[int]) -> None:
        """Raise `RefitError` if too few hold a version that is to be committed.

        Args:
            version: The version.
            alive: Receivers of its refit that are connected.
            gone: Those that are not any more.
        """
        for rank in gone:
            self._loaded.pop(rank, None)
        num_holders = len(self._holders(version) | set(alive))
        if num_holders < self._least:
            raise RefitError(
                f"the receiver is gone: {num_holders} hold version {version}, and "
                f"min_receivers={self._least}",
                rank=min(gone, default=None),
            )

    def with_fellows(self, lost: Iterable[int], ranks: Collection[int]) -> list[int]:
        """Return those of `ranks` whose engine has lost a receiver."""
        gone = {fellow for rank in lost for fellow in engine_of(rank, self.per_engine)}
        return sorted(gone.intersection(ranks))

    def begin(self, ranks: Iterable[int]) -> None:
        """Record whose weights a refit overwrites."""
        for rank in ranks:
            self._loaded.pop(rank, None)

    def finish(self, version: int, ranks: Iterable[int]) -> None:
        """Record who has loaded a version."""
        self._loaded.update(dict.fromkeys(ranks, version))

    def _holders(self, version: int) -> set[int]:
        held = {rank for rank, loaded in self._loaded.items() if loaded == version}
        return held - self.dropped.keys()


def engine_of(rank: int, per_engine: int) -> range:
    """Return the ranks of the engine to which a receiver belongs."""
    first = rank - rank % per_engine
    return range(first, first + per_engine)


def lost_with(rank: int, reason: str) -> str:
    """Return why a receiver is dropped whose engine has lost another one."""
    return f"its engine has lost receiver {rank}: {reason}"
