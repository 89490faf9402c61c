"""Meeting the other sides of a transport, without waiting for one that is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from rl_refit.deadline import Deadline
from rl_refit.errors import RefitError
from rl_refit.transports.base import ReceivingSide, SendingSide

_T = TypeVar("_T")

_WATCH_S = 0.02
# What a transport says of its own time limit says more.
_GRACE_S = 2.0


def join_watching(
    side: SendingSide | ReceivingSide, deadline: Deadline, watch: Callable[[], object]
) -> None:
    """Let a transport meet its other sides; raise what `watch` does meanwhile.

    What a transport waits in, a process group for example, may not notice a death before the time
    limit, or not even then. It is left alone in a thread of its own.

    Raises:
        RefitError: The transport failed, or has not come to an end within the limit.
    """
    waited_for = "meeting of the transport's sides"
    limit = Deadline(deadline.remaining(waited_for) + _GRACE_S)
    join_apart(lambda: side.join(deadline), limit, waited_for, watch=watch)


def join_apart(
    join: Callable[[], _T],
    limit: Deadline,
    waited_for: str,
    *,
    watch: Callable[[], object] = lambda: None,
    discard: Callable[[_T], object] = lambda result: None,
) -> _T:
    """Return what `join` does in a thread of its own, which is left alone if it takes too long.

    Args:
        join: What may take too long, or never end.
        limit: Of the waiting; `join` keeps no limit but its own.
        waited_for: What an error says that there was none of within the limit.
        watch: Called about every 20 ms; what it raises ends the waiting.
        discard: Called with a result that nobody waits for any more.

    Raises:
        RefitError: `join` raised it or another `RuntimeError`.
        RefitTimeoutError: `join` has not come to an end within the limit.
    """
    future: Future[_T] = Future()
    threading.Thread(target=_run, args=(join, future, discard), daemon=True).start()
    try:
        while not future.done():
            wait([future], min(_WATCH_S, limit.remaining(waited_for)))
            watch()
    except BaseException:
        if not future.cancel() and future.exception() is None:
            discard(future.result())
        raise
    try:
        return future.result()
    except RefitError:
        raise
    except RuntimeError as error:
        raise RefitError(f"cannot join the other side: {error}") from error


def _run(join: Callable[[], _T], future: Future[_T], discard: Callable[[_T], object]) -> None:
    try:
        result = join()
    except BaseException as error:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
        return
    if future.set_running_or_notify_cancel():
        future.set_result(result)
    else:
        discard(result)
