"""Calls of episodes on the way to their processes, and replies on the way back.

    submit(group, episode, call) -> the process of the group -> collect(): replies as they come

Nobody waits for a call: `collect` returns what is there. A process that hangs, raises or dies costs
the calls of its group, of which `collect` returns a `Failure`.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Protocol

from rl_policy.data.datasets import Problem
from rl_policy.environments.host import TOO_LONG, Reply

MARGIN_S = 1.0
"""Seconds beyond the limit of a call: what is awaited is ended by its process, which says so; only
then is the process."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a group has no replies."""

    reason: str


class NoProcessError(Exception):
    """A process cannot be had, as the parent of the processes cannot serve."""


class Processes(Protocol):
    """The processes of an exchange."""

    def process(self, group: int, *, starts: bool) -> Process:
        """Return the process of a group, which is started if there is none.

        Args:
            group: The group.
            starts: Whether its episodes start, so that a process without a parent is replaced.

        Raises:
            NoProcessError: There is none to be had.
        """
        ...

    def end(self, group: int, failure: Failure) -> Failure:
        """End the process of a group; return the failure, with its status where it had died."""
        ...


@dataclass(slots=True)
class Process:
    """A process of the environments of a group, and its calls in flight."""

    pid: int
    connection: socket.socket
    unsent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    waiting: set[int] = field(default_factory=set[int])
    """The episodes whose calls it has not answered."""
    deadline: float = 0.0

    def submit(self, episode: int, argument: Problem | str) -> None:
        """Take a call, for `send`."""
        value = argument if isinstance(argument, str) else asdict(argument)
        # Columns of a dataset may be dates and the like, of which an environment gets the text.
        self.unsent += json.dumps([episode, value], default=str).encode() + b"\n"
        self.waiting.add(episode)

    def events(self) -> int:
        """Return what `selectors` is to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)

    def send(self) -> None:
        """Send what fits."""
        del self.unsent[: self.connection.send(self.unsent)]

    def receive(self) -> dict[int, Reply]:
        """Return the replies that are there, by episode."""
        data = self.connection.recv(1 << 20)
        if not data:
            raise ConnectionResetError
        self.received += data
        *lines, rest = self.received.split(b"\n")
        self.received = bytearray(rest)
        replies: dict[int, Reply] = {}
        for line in lines:
            reply = json.loads(line)
            replies[reply.pop("episode")] = reply
        self.waiting -= replies.keys()
        return replies


class CallExchange:
    """Calls of episodes that nobody waits for, and their replies as they come.

    An episode has one call at a time; those of a group are answered by its process in their order,
    except that awaited ones wait beside each other. A plain object of one thread.

    Args:
        pool: Has the processes.
        first_group: See `ProcessPool.exchange`.
        limit_s: Most seconds in which a process neither takes anything of its calls nor answers.
    """

    def __init__(self, pool: Processes, *, first_group: int, limit_s: float) -> None:
        self._pool = pool
        self._first_group = first_group
        self._limit_s = limit_s
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, Process] = {}
        self._failed: dict[int, Failure] = {}

    def __enter__(self) -> CallExchange:
        """Return itself, for a `with` that closes it."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close it."""
        self.close()

    @property
    def num_waiting(self) -> int:
        """Groups with calls of which `collect` has not returned all replies, or the failure."""
        return len(self._running) + len(self._failed)

    def submit(self, group: int, episode: int, argument: Problem | str) -> None:
        """Make a call: a problem starts an episode, a text is a turn.

        Args:
            group: Under `EnvironmentPool.max_groups`.
            episode: Of the group; its last call has been answered.
            argument: Of the call.
        """
        if group in self._failed:
            return
        process = self._running.get(group)
        if process is None:
            try:
                process = self._pool.process(
                    self._first_group + group, starts=not isinstance(argument, str)
                )
            except NoProcessError as error:
                self._failed[group] = Failure(str(error))
                return
            self._running[group] = process
            process.submit(episode, argument)
            self._selector.register(process.connection, process.events(), group)
        else:
            process.submit(episode, argument)
            self._selector.modify(process.connection, process.events(), group)
        self._renew_deadline(process)

    def collect(self, *, timeout_s: float) -> list[tuple[int, dict[int, Reply] | Failure]]:
        """Wait until there is something; return it by group: replies by episode, or a failure.

        A group whose call fails has no further replies, and the others go on.

        Args:
            timeout_s: Most seconds to wait.
        """
        found: list[tuple[int, dict[int, Reply] | Failure]] = list(self._failed.items())
        self._failed.clear()
        deadlines = [process.deadline for process in self._running.values()]
        now = time.monotonic()
        until = min([now + (0.0 if found else timeout_s), *deadlines])
        if not self._running:
            if not found:
                time.sleep(timeout_s)
            return found
        for key, events in self._selector.select(max(0.0, until - now)):
            outcome = self._advance(key.data, events)
            if outcome:
                found.append((key.data, outcome))
        now = time.monotonic()
        late = [group for group, process in self._running.items() if process.deadline <= now]
        found += [(group, self.end(group, Failure(too_long(self._limit_s)))) for group in late]
        return found

    def end(self, group: int, failure: Failure) -> Failure:
        """End the process of a group, with its calls; return the failure, see `ProcessPool.end`."""
        if group in self._running:
            self._selector.unregister(self._running.pop(group).connection)
        return self._pool.end(self._first_group + group, failure)

    def forget(self, group: int) -> None:
        """End the process of a group that has calls which nobody waits for any more."""
        if group in self._running:
            self.end(group, Failure("its group has failed"))
        self._failed.pop(group, None)

    def close(self) -> None:
        """Wait for nothing any more; end the processes that have calls in flight."""
        for group in list(self._running):
            # A later call would get the replies to these.
            self.end(group, Failure("its calls were given up"))
        self._selector.close()

    def _advance(self, group: int, events: int) -> dict[int, Reply] | Failure:
        """Send and receive what can be; return the replies, or the failure of a group."""
        process = self._running[group]
        replies: dict[int, Reply] = {}
        try:
            if events & selectors.EVENT_WRITE:
                process.send()
            if events & selectors.EVENT_READ:
                replies = process.receive()
        except (BrokenPipeError, ConnectionResetError):
            return self.end(group, Failure(""))
        # Not by whole replies alone: between two of `collect` the caller may have done something
        # else for long, in which a call was not sent, or a reply had no room in the socket.
        self._renew_deadline(process)
        errors = [reply["error"] for reply in replies.values() if "error" in reply]
        if errors:
            reason = too_long(self._limit_s) if errors[0] == TOO_LONG else errors[0]
            return self.end(group, Failure(reason))
        if process.waiting:
            self._selector.modify(process.connection, process.events(), group)
        else:
            self._selector.unregister(process.connection)
            del self._running[group]
        return replies

    def _renew_deadline(self, process: Process) -> None:
        process.deadline = time.monotonic() + self._limit_s + MARGIN_S


def too_long(limit_s: float) -> str:
    """Return why a call that took longer than the limit has failed."""
    return f"a call took more than environment.timeout_s={limit_s:g}"
