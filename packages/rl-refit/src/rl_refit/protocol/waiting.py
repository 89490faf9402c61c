"""Time limits: one deadline per call, and waits that end when a peer has failed."""

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
"""A transport may exceed its limit by this much when it joins: its own error is more specific."""


class Closing(AbstractContextManager["Closing"]):
    """Is closed at the end of its `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Deadline:
    """The time limit of a call, shared by all of its waits.

    Args:
        seconds: From now.

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
            RefitTimeoutError: No time is left; the message names what was waited for.
        """
        left = self._end - time.monotonic()
        if left > 0:
            return left
        message = f"no {waited_for} within {self.seconds:g} s"
        raise RefitTimeoutError(message, rank=rank, bucket=bucket, tensor=tensor)


def poll_briefly(poll: Callable[[], Result]) -> Result:
    """Poll for a millisecond; return the first truthy result, or the last falsy one.

    Called before a blocking wait.
    """
    # The kernel tends to wake a sleeper on the core of the process that wrote to its socket: two
    # sides that sleep in turns then run one after the other, even if other cores are idle.
    end = time.perf_counter() + _SPIN_S
    while not (found := poll()) and time.perf_counter() < end:
        os.sched_yield()
    return found


def join_transport(
    join: Callable[[Deadline], None], deadline: Deadline, watch: Callable[[], object]
) -> None:
    """Join a transport's side to its peers; stop waiting if a peer fails.

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

    For library calls that may not return when a peer dies: constructing a process group, for
    example, may detect a death at its own time limit or never.

    Args:
        call: May block for ever, or as long as its own limit.
        limit: Of this wait.
        waited_for: Completes the error message "no ... within 3 s".
        watch: Called about every 20 ms; its exception ends the wait.
        discard: Releases a result that arrives after the wait has ended.

    Raises:
        RefitError: `call` raised it or another `RuntimeError`.
        RefitTimeoutError: `call` did not return within the limit.
    """
    future: Future[Result] = Future()
    # A daemon, so that a call that never returns does not keep the process alive.
    threading.Thread(target=_run, args=(call, future, discard), daemon=True).start()
    try:
        while not future.done():
            wait([future], min(_WATCH_INTERVAL_S, limit.remaining(waited_for)))
            watch()
    except BaseException:
        # If cancelled, the thread discards its result itself; otherwise the result is already here.
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
    # Pending until here, so that exactly one side discards: the waiting thread's `cancel` succeeds
    # before this line, and this claim of the future succeeds after it.
    if future.set_running_or_notify_cancel():
        future.set_result(result)
    else:
        discard(result)
