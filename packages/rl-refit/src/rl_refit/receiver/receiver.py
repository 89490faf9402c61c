"""`RefitReceiver`: loads what a sender streams, and tells which version the engine has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch

from rl_refit.errors import PlanMismatchError, RefitError
from rl_refit.protocol.channel import ChannelClosed
from rl_refit.protocol.endpoint import remove_remains
from rl_refit.protocol.messages import Begin, Commit, Failure, Ready, Start, raise_failure
from rl_refit.protocol.transaction import State, WeightVersion
from rl_refit.protocol.waiting import Closing, Deadline
from rl_refit.receiver.live_weights import LiveWeights
from rl_refit.receiver.session import Connector, Session, require_message
from rl_refit.receiver.stream import InboundStream, Load
from rl_refit.report import RefitReport, Stopwatch

logger = logging.getLogger(__name__)

ReadBack = Callable[[], Iterable[tuple[str, torch.Tensor]]]

_READ_S = 1.0
"""To read a message of which something has arrived."""
_DEATH_S = 0.1
"""How long the kernel may take to close the files of a killed process, one after the other."""


class RefitReceiver(Closing):
    """Loads what a sender streams, and knows which version is the committed one.

    `rl_refit.protocol.transaction` has its states. Not to be used from two threads at once. A
    commit of the sender is read at the next call.

    Args:
        address: The sender's `address`.
        rank: This receiver's rank, distinct among the sender's receivers.
        device: Where `load` wants its tensors.
        timeout_s: Limit of all waits of one `receive`, in seconds.
        expected: Name, dtype and shape of what the engine needs; an offer that differs is refused.
        into: The engine's own contiguous tensors by name; what arrives under these names is copied
            there. They are not passed to `load`, and no tensor waits for its last part: the fastest
            way for an engine whose weights have the trainer's names and shapes.

    Raises:
        ValueError: An argument is out of range, or a tensor of `into` is not contiguous.
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
        self._weights = WeightVersion(rank)
        self._is_caught_up = False
        self._live: LiveWeights | None = None

    @property
    def version(self) -> int | None:
        """The committed version; None before the first."""
        self._read_pending()
        return self._weights.committed

    def catch_up(self) -> None:
        """Process what the sender has sent; what it sends from now on belongs to the next refit.

        `begin` does so too, unless it was done since the last `receive`. An engine that learns the
        version only when it is to receive calls this before the sender begins: a sender that fails
        after that is noticed, and not taken for one whose refit this side has missed.
        """
        self._read_pending()
        if self._session is not None:
            has_failed = any(isinstance(message, Failure) for message in self._session.pending)
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
        self._weights.begin(version)

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
            load: Called once per bucket with the names and tensors that it completes, except those
                of `into`. A tensor is valid until `load` returns, and in read-only memory if the
                transport shares it. None only if all are of `into`.
            load_keeps: Whether `load` may keep a tensor until its full layer has arrived. Those
                whose layer continues in another bucket are copies then. Without, only tensors that
                are split over buckets are copied, to memory that is kept until the receiver is
                closed: twice the largest of them.
            check: Called after the last bucket, before the sender is told that all is loaded. What
                it raises fails the refit, as an error of `load` does.
            read_back: For `verify="weights"`: yields every name with the live parameter.

        Raises:
            RefitError: Something failed, here, at the sender or at another receiver. The receiver
                is poisoned until a refit succeeds.
        """
        self._weights.require_begun(version)
        deadline, watch = Deadline(self._timeout_s), Stopwatch()
        self._is_caught_up = False
        try:
            with watch.phase("pause"):
                session = self._meet(version, deadline)
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
            observe = None if self._live is None else self._live.observe
            unpack = partial(session.unpacker.unpack, load_keeps=load_keeps, observe=observe)
            stream.run(unpack, load or _refuse_to_load)
            self._check(check, read_back, watch)
            stream.finish()
        except BaseException as error:
            self._fail(error)
            if isinstance(error, ChannelClosed):
                raise RefitError(f"the sender is gone: {error}", rank=self._rank) from error
            raise
        self._weights.set_loaded()
        return watch.report(version, session.plan.nbytes, slowest_rank=self._rank)

    def check_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compare live parameters with what was received; for `verify="weights"`.

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
        self._read_pending()
        self._commit(version)

    def require_ready(self) -> int:
        """Return the committed version, if the engine's weights are exactly that version's.

        Raises:
            PoisonedError: The last refit failed.
            RefitInProgress: One has begun and is not committed.
            RefitError: None was ever committed.
        """
        self._read_pending()
        return self._weights.require_ready()

    def close(self) -> None:
        """Release the connection and the buffers. May be called again."""
        self._disconnect()

    def _check(
        self, check: Callable[[], None] | None, read_back: ReadBack | None, watch: Stopwatch
    ) -> None:
        """Let the engine object to what was loaded, and compare its live parameters."""
        if check is not None:
            with watch.phase("load"):
                try:
                    check()
                except RefitError:
                    raise
                except Exception as error:
                    raise RefitError(f"check failed: {error!r}", rank=self._rank) from error
        if self._live is not None and read_back is not None:
            with watch.phase("verify"):
                self._live.check(read_back(), rank=self._rank)

    def _meet(self, version: int, deadline: Deadline) -> Session:
        """Return the session in which the sender starts the refit: the current one or a new one."""
        while True:
            try:
                if self._session is None:
                    self._session = self._connector.connect(deadline)
                self._take_part(self._session, version, deadline)
                return self._session
            except ChannelClosed:
                # The sender has dropped all connections to start over. If it is dead, the next
                # attempt to connect fails.
                self._disconnect()

    def _take_part(self, session: Session, version: int, deadline: Deadline) -> None:
        begin = self._await_begin(session, deadline)
        if begin.version != version:
            raise RefitError(
                f"the sender sends version {begin.version} where {version} was begun",
                rank=self._rank,
            )
        if begin.plan_hash != session.plan.hash:
            raise PlanMismatchError(
                f"the sender's plan has the hash {begin.plan_hash}, this side's "
                f"{session.plan.hash}",
                rank=self._rank,
            )
        session.channel.send(Ready(version), deadline)
        started = session.channel.receive(deadline, "start: not all are ready")
        require_message(Start(version), started, rank=self._rank)

    def _await_begin(self, session: Session, deadline: Deadline) -> Begin:
        while True:
            if session.pending:
                message = session.pending.pop(0)
            else:
                message = session.channel.receive(deadline, "beginning of the refit")
            match message:
                case Begin():
                    return message
                case Failure():
                    raise_failure(message, origin="the sender")
                case Commit():
                    # Of a version that this side has given up, or committed by itself.
                    continue
                case _:
                    raise RefitError(
                        f"{type(message).__name__} arrived where a refit was to begin",
                        rank=self._rank,
                    )

    def _read_pending(self) -> None:
        """Process commits and failures that the sender has sent since the last call.

        The first message that belongs to `receive` stays pending, and so does all behind it: a
        sender that has failed reports it and hangs up, and the hang-up would end the session.
        """
        while (
            self._session is not None
            and not self._session.pending
            and self._session.channel.has_input()
        ):
            try:
                message = self._session.channel.receive(Deadline(_READ_S))
            except ChannelClosed:
                self._disconnect()
                return
            except RefitError as error:
                self._fail(error)
                return
            match message:
                case Commit(version) if self._weights.is_loaded(version):
                    self._commit(version)
                case Failure() if self._weights.state is State.LOADED:
                    self._weights.poison(f"the sender reports: {message.reason}")
                case Commit():
                    pass
                case _:
                    self._session.pending.append(message)

    def _commit(self, version: int) -> None:
        if self._weights.commit(version) and self._live is not None and not self._live.checked:
            logger.warning("version %d is committed, its live weights not compared", version)

    def _fail(self, error: BaseException) -> None:
        self._weights.poison(str(error) or repr(error))
        if self._session is not None:
            self._session.channel.close(error, rank=self._rank)
        self._disconnect()
        if isinstance(error, ChannelClosed):
            remove_remains(self._connector.endpoint, within_s=_DEATH_S)

    def _disconnect(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def _refuse_to_load(tensors: list[tuple[str, torch.Tensor]]) -> NoReturn:
    raise ValueError(f"there is no `load`, and {tensors[0][0]} is not of `into`")
