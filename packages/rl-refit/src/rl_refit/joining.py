"""Meeting the other sides of a transport, without waiting for one that is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rl_refit.deadline import Deadline
from rl_refit.errors import RefitError
from rl_refit.transports.base import ReceivingSide, SendingSide

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
    failed: list[BaseException] = []

    def join() -> None:
        try:
            side.join(deadline)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=join, daemon=True)
    waited_for = "meeting of the transport's sides"
    limit = Deadline(deadline.remaining(waited_for) + _GRACE_S)
    thread.start()
    while thread.is_alive():
        thread.join(min(_WATCH_S, limit.remaining(waited_for)))
        watch()
    for error in failed:
        if isinstance(error, RuntimeError):
            raise RefitError(f"cannot join the other side: {error}") from error
        raise error
