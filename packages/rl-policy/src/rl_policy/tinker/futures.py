"""Results of requests that are carried out later, and the thread that carries them out."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Job:
    """Something to carry out. Jobs of one `group` may be carried out together, in one call."""

    run: Callable[[Sequence[Any]], Sequence[object]]
    """Called in the thread with the arguments of one or more jobs; returns as many results."""
    argument: Any
    group: Hashable | None = None
    """None: alone."""
    size: int = 1
    """The jobs of a group have at most `JobThread.max_size` together."""
    future: asyncio.Future[object]


class JobThread:
    """A thread that carries out jobs in order; jobs of a group come with the first of them.

    Args:
        max_size: Of the jobs of one group that are carried out together.
        on_fatal: Called in the thread with an error that is not of one job alone, after which the
            thread ends. The jobs that wait, and those that come later, fail with it too.
        is_fatal: Which errors are.
    """

    def __init__(
        self,
        *,
        max_size: int,
        is_fatal: Callable[[Exception], bool],
        on_fatal: Callable[[Exception], None],
    ) -> None:
        self._max_size = max_size
        self._is_fatal = is_fatal
        self._on_fatal = on_fatal
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._fatal: Exception | None = None
        self._thread = threading.Thread(target=self._loop, name="tinker-jobs", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Add a job."""
        with self._changed:
            if self._is_closed:
                job.future.cancel()
                return
            if self._fatal is not None:
                _settle(job.future, error=self._fatal)
                return
            self._jobs.append(job)
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Drop the jobs that wait, and wait for the one in progress."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify()
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while (jobs := self._next()) is not None:
            try:
                results = jobs[0].run([job.argument for job in jobs])
            except Exception as error:
                for job in jobs:
                    _settle(job.future, error=error)
                if self._is_fatal(error):
                    self._fail_all(error)
                    # Where `close` has not waited long enough, its caller has ended the ranks.
                    if not self._is_closed:
                        self._on_fatal(error)
                    return
            else:
                for job, result in zip(jobs, results, strict=True):
                    _settle(job.future, result=result)

    def _fail_all(self, error: Exception) -> None:
        with self._changed:
            self._fatal = error
            for job in self._jobs:
                _settle(job.future, error=error)
            self._jobs.clear()

    def _next(self) -> list[Job] | None:
        with self._changed:
            while True:
                # Nobody waits for a cancelled one any more.
                while self._jobs and self._jobs[0].future.cancelled():
                    self._jobs.popleft()
                if self._is_closed:
                    return None
                if self._jobs:
                    return self._take()
                self._changed.wait()

    def _take(self) -> list[Job]:
        first = self._jobs.popleft()
        taken, size = [first], first.size
        if first.group is None:
            return taken
        kept: deque[Job] = deque()
        for job in self._jobs:
            fits = job.group == first.group and size + job.size <= self._max_size
            if fits and not job.future.cancelled():
                taken.append(job)
                size += job.size
            else:
                kept.append(job)
        self._jobs = kept
        return taken


def _settle(
    future: asyncio.Future[object], *, result: object = None, error: Exception | None = None
) -> None:
    def settle() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    try:
        future.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:
        # The server's loop is closed: it has ended in the meantime.
        logger.debug("a result came after the end of the server")


@dataclass(slots=True)
class _Entry:
    owner: str
    future: asyncio.Future[object]
    retrieved_at: float | None = None


@dataclass(slots=True)
class Futures:
    """The results by request id; each is kept for a while after it has been retrieved.

    Attributes:
        kept_s: How long, in seconds: the answer may have been lost on its way.
    """

    kept_s: float
    _entries: dict[str, _Entry] = field(default_factory=dict[str, _Entry])

    def get(self, request_id: str) -> asyncio.Future[object] | None:
        """Return a future; None if there is none of that id."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.future

    def add(self, request_id: str, *, owner: str) -> asyncio.Future[object]:
        """Return a new future.

        Args:
            request_id: A new id.
            owner: The session, for `drop`.
        """
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        # One that nobody retrieves is no error of the server's.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._entries[request_id] = _Entry(owner, future)
        return future

    @property
    def are_retrieved(self) -> bool:
        """Whether the client has been sent the result of each."""
        return all(entry.retrieved_at is not None for entry in self._entries.values())

    def note_retrieved(self, request_id: str) -> None:
        """Remember that the client has been sent the result."""
        entry = self._entries[request_id]
        entry.retrieved_at = entry.retrieved_at or monotonic()

    def sweep(self) -> None:
        """Forget what was retrieved long enough ago."""
        limit = monotonic() - self.kept_s
        self._entries = {
            key: entry
            for key, entry in self._entries.items()
            if entry.retrieved_at is None or entry.retrieved_at > limit
        }

    def drop(self, owner: str) -> None:
        """Cancel and forget the futures of a session."""
        for key, entry in list(self._entries.items()):
            if entry.owner == owner:
                entry.future.cancel()
                del self._entries[key]


class InOrder:
    """Submits the requests of one model in the order of their numbers, each exactly once.

    Chunks of one call arrive in any order, and a request that was sent again must not be carried
    out twice.

    Args:
        first: The first number.
        gap_s: How long a request waits for those before it, in seconds.
    """

    def __init__(self, *, first: int, gap_s: float) -> None:
        self._next = first
        self._gap_s = gap_s
        self._waiting: dict[int, tuple[Callable[[], object], asyncio.Future[object] | None]] = {}

    def submit(
        self, number: int, start: Callable[[], object], future: asyncio.Future[object] | None
    ) -> None:
        """Call `start` after those of all lower numbers.

        If one of those does not arrive in time the future fails.
        """
        self._waiting[number] = start, future
        self._advance()
        if number in self._waiting:
            asyncio.get_running_loop().call_later(self._gap_s, self._give_up, number)

    def skip(self, number: int) -> None:
        """Count a request that was refused."""
        self.submit(number, lambda: None, None)

    def is_past(self, number: int) -> bool:
        """Return whether a request of that number has been submitted."""
        return number < self._next or number in self._waiting

    def _advance(self) -> None:
        while self._next in self._waiting:
            start, _ = self._waiting.pop(self._next)
            self._next += 1
            start()

    def _give_up(self, number: int) -> None:
        if number not in self._waiting:
            return
        missing = self._next
        for each in sorted(key for key in self._waiting if key <= number):
            _, future = self._waiting.pop(each)
            if future is not None and not future.done():
                future.set_exception(
                    TimeoutError(
                        f"request {each} waits for request {missing}, which has not arrived "
                        f"within {self._gap_s:g} s"
                    )
                )
        self._next = number + 1
        self._advance()
