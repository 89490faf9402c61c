"""`RefitReceiver`: loads what a sender streams, and knows the version of the engine's weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch

from rl_refit.digest import digest_of_all
from rl_refit.ends.inbound import InboundStream, LiveWeights, Load
from rl_refit.ends.session import Connector, Session
from rl_refit.errors import PlanMismatchError, RefitError
from rl_refit.protocol import State, WeightVersion
from rl_refit.protocol.channel import (
    Begin,
    ChannelClosed,
    Commit,
    Failure,
    Ready,
    Start,
    raise_failure,
    require_message,
)
from rl_refit.protocol.endpoint import remove_remains
from rl_refit.protocol.waiting import Closing, Deadline
from rl_refit.report import RefitReport, Stopwatch, Traffic

logger = logging.getLogger(__name__)

ReadBack = Callable[[], Iterable[tuple[str, torch.Tensor]]]
Swap = Callable[[], object]
"""Exchanges the engine's weights with those that `load` has staged."""

_READ_S = 5.0
"""Limit for the rest of a message of which some bytes have arrived."""
_DEATH_S = 0.5
"""How long the kernel may take from closing the socket of a killed process to its lock file."""
_CLOSE_S = 5.0
"""Limit for a thread that receives to notice that its connection was closed."""
_HANG_UP_S = 0.05
"""How often the connection of such a thread is ended, which may open another."""


class RefitReceiver(Closing):
    """Loads what a sender streams, and knows which version is committed.

    Its states are those of `rl_refit.protocol`. It processes a commit of the sender at the next
    call. Not thread-safe, with one exception: while one thread is in `receive`, another may call
    `require_ready`, `version` and `close`.

    Args:
        address: The sender's `address`.
        rank: This receiver's rank, distinct among the sender's receivers.
        device: Where `load` expects its tensors.
        timeout_s: Limit of one `receive`, all waits together, in seconds.
        expected: Name, dtype and shape of the tensors that the engine needs; a sender with others
            is refused.
        into: The engine's own contiguous tensors by name. Received tensors of these names are
            copied into them, piece by piece, and not passed to `load`: the fastest way for an
            engine whose weights have the trainer's names and shapes. If `into` has every tensor of
            a sender with `delta` and verify="digest", in host memory and of an even number of
            bytes, changes are set in them and no copy is kept. Nothing else may change them then:
            the next refit would fail.
        keep_spans: Report when each phase ran, see `RefitReport.spans`.

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
        keep_spans: bool = False,
    ) -> None:
        Deadline(timeout_s)
        self._rank = rank
        self._keep_spans = keep_spans
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
        self._swap: Swap | None = None
        self._begun_at = 0.0
        self._held: int | None = None
        self._gets_base = True
        self._is_closing = False
        # Held by whoever reads the connection: a call beside `receive` must not take its messages.
        self._reading = threading.Lock()

    @property
    def version(self) -> int | None:
        """The committed version; None before the first."""
        self._read_pending()
        return self._weights.committed

    @property
    def held_base(self) -> int | None:
        """Digest of the base that the engine holds beside its adapters; None for none."""
        return self._held

    @property
    def gets_base(self) -> bool:
        """Whether the refit that is received has more than adapters."""
        return self._gets_base

    def forget_base(self) -> None:
        """Ask for the base once more: the engine has lost it."""
        self._held = None

    def catch_up(self) -> None:
        """Process the sender's pending messages; later ones belong to the next refit.

        `begin` does so as well, unless this was called since the last `receive`. For an engine that
        learns the version only when it has to receive: it calls this before the sender begins. A
        failure that the sender reports afterwards then fails this refit. Without the call it would
        be attributed to a refit that this side has missed.

        Raises:
            RefitError: Another thread is in `receive`. Nothing changes.
        """
        self._require_alone()
        self._read_pending()
        if self._session is not None:
            has_failed = any(isinstance(message, Failure) for message in self._session.pending)
            if has_failed or self._session.channel.has_hung_up():
                self._disconnect()
        self._is_caught_up = True

    def begin(self, version: int, *, swap: Swap | None = None) -> None:
        """Open a refit: until it is committed, `require_ready` raises.

        Call it before the sender begins, see `catch_up`.

        Args:
            version: Of the new weights.
            swap: Makes it a staged refit: `load` and `check` leave the engine's weights alone, and
                `swap` exchanges them with what was loaded, once, when the version is committed. The
                committed version stays ready until then, also if the refit fails. It is called in
                the thread that calls `commit`, `require_ready` or `version`; if it raises, the
                weights are undefined.

        Raises:
            StaleVersionError: The version is not newer than the committed one. Nothing changes.
            ValueError: `swap` is given to a receiver with `into`, which would be overwritten.
            RefitError: Another thread is in `receive`. Nothing changes.
        """
        self._require_alone()
        if swap is not None and self._connector.has_own_tensors:
            raise ValueError("a staged refit goes through `load`: `into` overwrites what is served")
        if not self._is_caught_up:
            self.catch_up()
            self._is_caught_up = False
        self._weights.begin(version, staged=swap is not None)
        self._swap, self._begun_at, self._is_closing = swap, time.perf_counter(), False

    def receive(
        self,
        version: int,
        load: Load | None = None,
        *,
        load_keeps: bool = True,
        check: Callable[[], None] | None = None,
        read_back: ReadBack | None = None,
    ) -> RefitReport:
        """Load the version that was begun; return when every receiver of the sender has loaded it.

        Args:
            version: The version given to `begin`.
            load: Called once per bucket with the names and tensors that it completes, except those
                of `into`. A tensor is valid until `load` returns, and in read-only memory if the
                transport shares it. None only if all tensors are in `into`.
            load_keeps: Whether `load` may keep a tensor until its full layer has arrived. Tensors
                whose layer continues in another bucket are then cloned. Otherwise only split
                tensors are copied, to memory of twice the largest of them, which is kept until the
                receiver is closed.
            check: Called after the last bucket, before `Done` is reported. Its exception fails the
                refit, like one of `load`.
            read_back: For `verify="weights"`: yields every live parameter with its name.

        Raises:
            RefitError: This side, the sender or another receiver failed. The receiver is poisoned
                until a refit succeeds; one whose refit was staged keeps its committed version.
        """
        self._weights.require_begun(version)
        with self._reading:
            return self._receive(version, load or _refuse_to_load, load_keeps, check, read_back)

    def _receive(
        self,
        version: int,
        load: Load,
        load_keeps: bool,
        check: Callable[[], None] | None,
        read_back: ReadBack | None,
    ) -> RefitReport:
        deadline, traffic = Deadline(self._timeout_s), Traffic()
        watch = Stopwatch(keep_spans=self._keep_spans)
        self._is_caught_up = False
        try:
            with watch.phase("join"):
                session, started = self._meet(version, deadline)
            if session.base is not None:
                session.base.version = None
            stream = InboundStream(
                plan=session.plan,
                side=session.side,
                channel=session.channel,
                version=version,
                digest=None if session.offer.verify == "none" else session.offer.digest,
                rank=self._rank,
                num_buffers=session.offer.num_buffers,
                deadline=deadline,
                watch=watch,
                base=session.base,
                delta=started.delta,
                traffic=traffic,
                first_bucket=session.plan.first_adapter_bucket if started.adapters_only else 0,
            )
            self._gets_base = not started.adapters_only
            if self._gets_base:
                self._held = None
            self._live = LiveWeights(watch) if session.offer.verify == "weights" else None
            observe = None if self._live is None else self._live.observe
            unpack = partial(session.unpacker.unpack, load_keeps=load_keeps, observe=observe)
            stream.run(unpack, load)
            # Before `Done`, so that an error here fails the refit at every receiver.
            self._check(check, read_back, watch)
            watch.add(
                "pause", 0.0 if self._weights.is_staged else time.perf_counter() - self._begun_at
            )
            stream.finish(pause_s=watch.of("pause"), staged=self._swap is not None)
        except BaseException as error:
            self._fail(error)
            if self._is_closing:
                raise RefitError("the receiver was closed", rank=self._rank) from error
            if isinstance(error, ChannelClosed):
                raise RefitError(f"the sender is gone: {error}", rank=self._rank) from error
            raise
        if session.base is not None:
            session.base.version = version
        if self._gets_base and session.plan.adapters_from is not None:
            self._held = digest_of_all(stream.digests[: session.plan.first_adapter_bucket])
        self._weights.set_loaded()
        return watch.report(
            version,
            session.plan.nbytes,
            traffic=traffic,
            slowest_rank=self._rank,
            staged=self._swap is not None,
        )

    def check_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compare live parameters with what was received; for `verify="weights"`.

        For an engine whose parameters are complete only after `receive`: call it before `commit`.

        Raises:
            VerificationError: A parameter is missing or differs. The receiver is poisoned.
            RefitError: Nothing was received with `verify="weights"`.
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
            RefitError: `version` is not loaded.
        """
        # The sender may have reported a failure after `receive` returned, which forbids the commit.
        self._read_pending()
        self._commit(version)

    def require_ready(self) -> int:
        """Return the committed version, if the engine holds exactly its weights.

        Raises:
            PoisonedError: The last refit failed.
            RefitInProgress: A refit has begun and is not committed.
            RefitError: No version was committed yet.
        """
        self._read_pending()
        return self._weights.require_ready()

    def close(self) -> None:
        """Release the connection and the buffers. May be called again.

        A refit that another thread receives fails.
        """
        self._is_closing = True
        if not self._reading.acquire(blocking=False) and not self._interrupt():
            logger.warning("a refit is still being received; it ends at its time limit")
            return
        try:
            self._disconnect()
        finally:
            self._reading.release()

    def _require_alone(self) -> None:
        if self._reading.locked():
            raise RefitError(
                f"another thread still receives version {self._weights.begun}: close() ends that",
                rank=self._rank,
            )

    def _interrupt(self) -> bool:
        """Make another thread leave `receive`, and take its lock; return False if it stays."""
        give_up = time.monotonic() + _CLOSE_S
        while time.monotonic() < give_up:
            session = self._session
            if session is not None:
                session.channel.hang_up()
            self._connector.hang_up()
            # Not once: the thread may just be opening a connection.
            if self._reading.acquire(timeout=_HANG_UP_S):
                return True
        return False

    def _check(
        self, check: Callable[[], None] | None, read_back: ReadBack | None, watch: Stopwatch
    ) -> None:
        """Run the engine's own check, and compare its live parameters."""
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

    def _meet(self, version: int, deadline: Deadline) -> tuple[Session, Start]:
        """Return the session in which the sender starts the refit, and how it does.

        It is the current session or a new one.
        """
        while not self._is_closing:
            try:
                if self._session is None:
                    self._session = self._connector.connect(deadline)
                    continue  # unless it was closed meanwhile
                return self._session, self._take_part(self._session, version, deadline)
            except ChannelClosed:
                # The sender dropped all connections to start over, so connect again. If it is dead,
                # that raises.
                self._disconnect()
        raise RefitError("the receiver was closed", rank=self._rank)

    def _take_part(self, session: Session, version: int, deadline: Deadline) -> Start:
        """Wait until the refit starts; return how."""
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
        base = None if session.base is None else session.base.version
        session.channel.send(Ready(version, base, self._held), deadline)
        message = session.channel.receive(deadline, "start: not all are ready")
        started = message if isinstance(message, Start) else Start(version, delta=False)
        # What this side has not offered is a message out of order.
        due = Start(
            version,
            delta=started.delta and base is not None,
            adapters_only=started.adapters_only and self._held is not None,
        )
        require_message(due, message, rank=self._rank)
        return due

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
                    # Of a version that failed on this side, or was committed by the engine.
                    continue
                case _:
                    raise RefitError(
                        f"{type(message).__name__} arrived where a refit was to begin",
                        rank=self._rank,
                    )

    def _read_pending(self) -> None:
        """Process the commits and failures that the sender has sent since the last call.

        Nothing while another thread receives: what arrives then belongs to its refit.
        """
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._process_pending()
        finally:
            self._reading.release()

    def _process_pending(self) -> None:
        """Process what is pending, up to the first message that belongs to `receive`.

        That stays pending, and so do all behind it: reading on would reach the hang-up of a failed
        sender, which ends the session and loses its report.
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
        if self._swap is not None and not self._weights.is_committed(version):
            self._weights.require_loaded(version)
            swap, self._swap = self._swap, None
            self._weights.start_swap()
            try:
                swap()
            except BaseException as error:
                self._fail(error)
                raise
        if self._weights.commit(version) and self._live is not None and not self._live.checked:
            logger.warning("version %d is committed, its live weights not compared", version)

    def _fail(self, error: BaseException) -> None:
        # Before anything below can raise: the engine must not sample from a mixture of weights.
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
