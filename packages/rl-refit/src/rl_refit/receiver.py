"""The inference engine's end of a refit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NoReturn

import torch

from rl_refit import endpoint
from rl_refit.closing import Closing
from rl_refit.control import ChannelClosed
from rl_refit.deadline import Deadline
from rl_refit.errors import (
    PlanMismatchError,
    PoisonedError,
    RefitError,
    RefitInProgress,
    StaleVersionError,
)
from rl_refit.failures import raise_failure
from rl_refit.inbound import InboundStream, Load
from rl_refit.live_weights import LiveWeights
from rl_refit.messages import Begin, Commit, Failure, Ready, Start
from rl_refit.report import RefitReport, Stopwatch
from rl_refit.sender import make_report
from rl_refit.session import Connector, Session, expect

logger = logging.getLogger(__name__)

ReadBack = Callable[[], Iterable[tuple[str, torch.Tensor]]]
State = Literal["empty", "in progress", "loaded", "ready", "poisoned"]

_GOODBYE_S = 1.0
_DEATH_S = 0.1
"""How long the kernel may take to close the files of a killed process, one after the other."""


class RefitReceiver(Closing):
    """Loads what a sender streams, and knows which version is the committed one.

    Not to be used from two threads at once. A commit of the sender is noticed at the next call.

    Args:
        address: The sender's `address`.
        rank: This receiver's rank, unlike that of any other receiver of the sender.
        device: Where `load` wants its tensors.
        timeout_s: The most seconds that `receive` waits in all.
        expected: Name, dtype and shape of what the engine needs; an offer that differs is refused.
        into: The engine's own contiguous tensors, by name, that are overwritten with what comes
            under these names. They are not handed to `load`, and no tensor waits until its last
            part has come: the fastest way for an engine whose weights are the trainer's.
    """

    def __init__(
        self,
        address: Mapping[str, str | int],
        rank: int = 0,
        *,
        device: torch.device | str = "cpu",
        timeout_s: float = 300.0,
        expected: Iterable[tuple[str, torch.dtype, Sequence[int]]] | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        Deadline(timeout_s)
        self._rank = rank
        self._timeout_s = timeout_s
        self._connector = Connector(
            address,
            rank,
            device=torch.device(device),
            timeout_s=timeout_s,
            expected=expected,
            into=into or {},
        )
        self._session: Session | None = None
        self._state: State = "empty"
        self._reason = ""
        self._begun: int | None = None
        self._version: int | None = None
        self._is_caught_up = False
        self._live: LiveWeights | None = None

    @property
    def version(self) -> int | None:
        """The committed version; None before the first."""
        self._catch_up()
        return self._version

    def catch_up(self) -> None:
        """Take in what the sender has said: what it says from now on is of the next refit.

        `begin` does so too, where it was not done since the last `receive`. An engine that learns
        the version only when it is to receive calls this before the sender begins: a sender that
        then fails is heard, and not taken for one whose refit this side has missed.
        """
        self._catch_up()
        if self._session is not None:
            has_failed = any(isinstance(message, Failure) for message in self._session.early)
            if has_failed or self._session.channel.has_hung_up():
                self._disconnect()
        self._is_caught_up = True

    def begin(self, version: int) -> None:
        """Open a refit: until it is committed, `require_ready` raises.

        Call it before the sender begins, for the reason that `catch_up` gives.

        Raises:
            StaleVersionError: The version is not newer than the committed one. Nothing changes.
        """
        if not self._is_caught_up:
            self.catch_up()
            self._is_caught_up = False
        if self._version is not None and version <= self._version:
            raise StaleVersionError(
                f"version {version} is not newer than the committed {self._version}",
                rank=self._rank,
            )
        self._begun = version
        self._state = "in progress"

    def receive(
        self,
        version: int,
        load: Load | None = None,
        *,
        load_keeps: bool = True,
        check: Callable[[], None] | None = None,
        read_back: ReadBack | None = None,
    ) -> RefitReport:
        """Load the version that was begun; return when every receiver of the sender has.

        Args:
            version: The one given to `begin`.
            load: Called once per bucket with the names and tensors that it completes, but for those
                of `into`. A tensor is valid until `load` returns, and in read-only memory where
                the transport shares it. None only where all are of `into`.
            load_keeps: Whether `load` may keep a tensor until all of its layer has come. Those
                whose layer goes on in another bucket are copies then. Without, only tensors that
                are split over buckets are copied, to memory that is kept until the receiver is
                closed: twice the largest of them.
            check: Called after the last bucket, before the sender is told that all is loaded. What
                it raises fails the refit, as an error of `load` does.
            read_back: For `verify="weights"`: yields every name with the live parameter.

        Raises:
            RefitError: Something failed, here, at the sender or at another receiver. The receiver
                is poisoned until a refit succeeds.
        """
        if self._state != "in progress" or self._begun != version:
            raise RefitError(f"version {version} was not begun ({self._status()})", rank=self._rank)
        deadline, watch = Deadline(self._timeout_s), Stopwatch()
        self._is_caught_up = False
        try:
            with watch.phase("pause"):
                self._meet(version, deadline)
            self._load_all(
                version,
                load or _have_no_load,
                load_keeps=load_keeps,
                check=check,
                read_back=read_back,
                deadline=deadline,
                watch=watch,
            )
        except BaseException as error:
            self._fail(error)
            if isinstance(error, ChannelClosed):
                raise RefitError(f"the sender is gone: {error}", rank=self._rank) from error
            raise
        self._state = "loaded"
        assert self._session is not None
        return make_report(version, self._session.plan, watch, slowest_rank=self._rank)

    def check_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hold live parameters against what was received; for `verify="weights"`.

        For an engine whose parameters are only complete after `receive`: call it before `commit`.

        Raises:
            VerificationError: A parameter is missing or differs. The receiver is poisoned.
            RefitError: There is nothing to compare with.
        """
        if self._live is None:
            raise RefitError('nothing was received with verify="weights"', rank=self._rank)
        try:
            self._live.check(tensors, rank=self._rank)
        except BaseException as error:
            self._fail(error)
            raise

    def commit(self, version: int) -> None:
        """Make the loaded version the committed one; does nothing if it is already.

        Raises:
            PoisonedError: The refit failed.
            RefitError: That version is not loaded.
        """
        self._catch_up()
        if self._state == "ready" and self._version == version:
            return
        if self._state == "poisoned":
            self._refuse()
        if self._state != "loaded" or self._begun != version:
            raise RefitError(
                f"version {version} cannot be committed: {self._status()}", rank=self._rank
            )
        self._commit(version)

    def require_ready(self) -> int:
        """Return the committed version, if the engine's weights are exactly that version's.

        Raises:
            PoisonedError: The last refit failed.
            RefitInProgress: One has begun and is not committed.
            RefitError: None was ever committed.
        """
        self._catch_up()
        if self._state == "poisoned":
            self._refuse()
        if self._state in ("in progress", "loaded"):
            raise RefitInProgress(self._status(), rank=self._rank)
        if self._version is None:
            raise RefitError("no version was committed yet", rank=self._rank)
        return self._version

    def close(self) -> None:
        """Let go of the connection and the buffers. May be called again."""
        self._disconnect()

    def _load_all(
        self,
        version: int,
        load: Load,
        *,
        load_keeps: bool,
        check: Callable[[], None] | None,
        read_back: ReadBack | None,
        deadline: Deadline,
        watch: Stopwatch,
    ) -> None:
        session = self._session
        assert session is not None
        stream = InboundStream(
            session.plan,
            session.side,
            session.channel,
            version=version,
            digest=None if session.offer.verify == "none" else session.offer.digest,
            rank=self._rank,
            num_buffers=session.offer.num_buffers,
            deadline=deadline,
            watch=watch,
        )
        self._live = LiveWeights(watch) if session.offer.verify == "weights" else None
        notice = None if self._live is None else self._live.remember
        unpack = partial(session.unpacker.unpack, load_keeps=load_keeps, notice=notice)
        stream.run(unpack, load)
        if check is not None:
            with watch.phase("load"):
                self._check(check)
        if self._live is not None and read_back is not None:
            with watch.phase("verify"):
                self._live.check(read_back(), rank=self._rank)
        stream.finish()

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except RefitError:
            raise
        except Exception as error:
            raise RefitError(f"check failed: {error!r}", rank=self._rank) from error

    def _meet(self, version: int, deadline: Deadline) -> None:
        """Wait until the sender begins, over the connection there is or a new one."""
        while True:
            try:
                if self._session is None:
                    self._session = self._connector.connect(deadline)
                return self._take_part(self._session, version, deadline)
            except ChannelClosed:
                # The sender has dropped all connections, to begin afresh. It is dead if the next
                # attempt to connect fails.
                self._disconnect()

    def _take_part(self, session: Session, version: int, deadline: Deadline) -> None:
        begin = self._await_begin(session, deadline)
        if begin.version != version:
            told = f"the sender sends version {begin.version} where {version} was begun"
            raise RefitError(told, rank=self._rank)
        if begin.plan_hash != session.plan.hash:
            raise PlanMismatchError(
                f"the sender's plan is {begin.plan_hash}, this one {session.plan.hash}",
                rank=self._rank,
            )
        session.channel.send(Ready(version), deadline)
        started = session.channel.receive(deadline, "start: not all are ready")
        expect(Start(version), started, rank=self._rank)

    def _await_begin(self, session: Session, deadline: Deadline) -> Begin:
        while True:
            if session.early:
                message = session.early.pop(0)
            else:
                message = session.channel.receive(deadline, "beginning of the refit")
            match message:
                case Begin():
                    return message
                case Failure():
                    raise_failure(message, origin="the sender")
                case Commit():
                    continue
                case _:
                    told = f"{type(message).__name__} came where a refit was to begin"
                    raise RefitError(told, rank=self._rank)

    def _catch_up(self) -> None:
        """Take in what the sender has said since the last call.

        What is for `receive` stays, and so does all behind it: a sender that has failed says so
        and hangs up, and the hang-up ends the session.
        """
        while (
            self._session is not None
            and not self._session.early
            and self._session.channel.has_input()
        ):
            try:
                message = self._session.channel.receive(Deadline(_GOODBYE_S))
            except ChannelClosed:
                self._disconnect()
                return
            except RefitError as error:
                self._fail(error)
                return
            match message:
                case Commit(version) if self._state == "loaded" and version == self._begun:
                    self._commit(version)
                case Failure() if self._state == "loaded":
                    self._state, self._reason = "poisoned", f"the sender reports: {message.reason}"
                case Commit():
                    pass
                case _:
                    self._session.early.append(message)

    def _commit(self, version: int) -> None:
        if self._live is not None and not self._live.checked:
            logger.warning("version %d is committed, its live weights not compared", version)
        self._version = version
        self._state = "ready"

    def _fail(self, error: BaseException) -> None:
        self._state, self._reason = "poisoned", str(error) or repr(error)
        if self._session is not None:
            self._session.channel.leave(error, rank=self._rank)
        self._disconnect()
        if isinstance(error, ChannelClosed):
            endpoint.forget(self._connector.endpoint, within_s=_DEATH_S)

    def _disconnect(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _status(self) -> str:
        if self._state == "poisoned":
            return f"the last refit failed: {self._reason}"
        return f"state {self._state}, begun {self._begun}, committed {self._version}"

    def _refuse(self) -> NoReturn:
        told = f"{self._status()}; the weights are undefined until a full refit succeeds"
        raise PoisonedError(told, rank=self._rank)


def _have_no_load(tensors: list[tuple[str, torch.Tensor]]) -> NoReturn:
    raise ValueError(f"there is no `load`, and {tensors[0][0]} is not of `into`")
