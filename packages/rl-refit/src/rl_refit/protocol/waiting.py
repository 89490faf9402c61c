"""Every wait of a refit: one time limit per call, and waits that end when a peer is gone."""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from typing import Self, TypeVar

from rl_refit.errors import RefitError, RefitTimeoutError

Result = TypeVar("Result")

_SPIN_S = 0.001
_WATCH_INTERVAL_S = 0.02
_JOIN_GRACE_S = 2.0
"""How much longer than its limit a transport may take to join: its own error says more."""


class Closing(AbstractContextManager["Closing"]):
    """Closes itself at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Deadline:
    """One time limit for a whole call, however many waits it has.

    Args:
        seconds: From now on.

    Raises:
        ValueError: `seconds` is not positive.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"timeout_s={seconds} is not positive")
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def at_least(self, seconds: float) -> Deadline:
        """Return this deadline, or one `seconds` from now if that is later."""
        return Deadline(max(self._end - time.monotonic(), seconds))

    def remaining(
        self,
        waited_for: str,
        *,
        rank: int | None = None,
        bucket: int | None = None,
        tensor: str | None = None,
    ) -> float:
        """Return the seconds that are left.

        Raises:
            RefitTimeoutError: None is left; the message says what was waited for.
        """
        left = self._end - time.monotonic()
        if left > 0:
            return left
        message = f"no {waited_for} within {self.seconds:g} s"
        raise RefitTimeoutError(message, rank=rank, bucket=bucket, tensor=tensor)


def poll_briefly(poll: Callable[[], Result]) -> Result:
    """Return what `poll` finds within a millisecond, or the falsy result of the last attempt.

    To be called before a blocking wait.
    """
    # The kernel tends to wake a sleeper on the processor of the process that wrote to its socket:
    # two sides that sleep in turns then run one after the other, whatever processors are idle.
    end = time.perf_counter() + _SPIN_S
    while not (found := poll()) and time.perf_counter() < end:
        os.sched_yield()
    return found


def join_transport(
    join: Callable[[Deadline], None], deadline: Deadline, watch: Callable[[], object]
) -> None:
    """Let a transport's side join its peers, and stop waiting if one of them fails.

    Args:
        join: The `join` of a sending or receiving side.
        deadline: Its limit.
        watch: Called about every 20 ms; raises if a peer has failed.

    Raises:
        RefitError: The transport failed, or did not return within its limit.
    """
    waited_for = "join of the transport's sides"
    limit = Deadline(deadline.remaining(waited_for) + _JOIN_GRACE_S)
    run_bounded(lambda: join(deadline), limit, waited_for, watch=watch)


def run_bounded(
    call: Callable[[], Result],
    limit: Deadline,
    waited_for: str,
    *,
    watch: Callable[[], object] = lambda: None,
    discard: Callable[[Result], object] = lambda result: None,
) -> Result:
    """Return the result of `call`, which runs in a thread that is abandoned if it takes too long.

    For a library's call that may not return when a peer dies: making a process group, for example,
    may notice a death at its time limit or never.

    Args:
        call: May block for ever; what limit it has is its own.
        limit: Of the wait here.
        waited_for: Completes the error message "no ... within 3 s".
        watch: Called about every 20 ms; what it raises ends the wait.
        discard: Called with a result that arrives after the wait has ended.

    Raises:
        RefitError: `call` raised it or another `RuntimeError`.
        RefitTimeoutError: `call` did not return within the limit.
    """
    future: Future[Result] = Future()
    threading.Thread(target=_run, args=(call, future, discard), daemon=True).start()
    try:
        while not future.done():
            wait([future], min(_WATCH_INTERVAL_S, limit.remaining(waited_for)))
            watch()
    except BaseException:
        # Cancelled, the thread discards its result itself; else the result is already here.
        if not future.cancel() and future.exception() is None:
            discard(future.result())
        raise
    try:
        return future.result()
    except RefitError:
        raise
    except RuntimeError as error:
        raise RefitError(f"cannot join the other side: {error}") from error


def _run(
    call: Callable[[], Result], future: Future[Result], discard: Callable[[Result], object]
) -> None:
    try:
        result = call()
    except BaseException as error:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
        return
    # The future stays pending until here, so that the waiting thread can still cancel it.
    if future.set_running_or_notify_cancel():
        future.set_result(result)
    else:
        discard(result)
