"""The driver's side of users' environments: a process for each group, and what becomes of failures.

An environment that hangs, raises or dies costs its group: the calls of that group give a `Failure`,
its process is ended, and the next episode of the group has a new one.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias

from rl_interfaces import Environment

from rl_policy.data.datasets import Problem
from rl_policy.data.user_code import UnusableError, end_process, require_name
from rl_policy.environments.host import TOO_LONG, Call, EpisodeHost, Reply, require_environment
from rl_policy.environments.server import MESSAGE_BYTES

KEY = "environment.function"

LOAD_LIMIT_S = 120.0
"""Most seconds of the import of an environment, which happens once, and may be torch's."""

# What is awaited is ended by its process, which says so; only then is the process.
_MARGIN_S = 1.0
# A fork takes milliseconds, unless the machine has no memory left.
_SERVER_LIMIT_S = 60.0

_LOGGER = logging.getLogger(__name__)

Turn: TypeAlias = Mapping[int, Problem | str]
"""Of a group: by episode, a problem to start from, or the policy's text."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a group has no replies."""

    reason: str


class EnvironmentPool(Protocol):
    """Environments of many episodes, in groups that fail apart from each other."""

    name: str
    """Of the class or function that makes them."""
    max_groups: int
    """Most groups at a time."""

    def play(self, turns: Mapping[int, Turn]) -> dict[int, dict[int, Reply] | Failure]:
        """Return by group the replies to the calls of its episodes.

        Args:
            turns: By group. Groups are numbers under `max_groups`; one of a former call goes on.
        """
        ...

    def close(self) -> None:
        """End all of them. May be called again."""
        ...


class ProcessPool:
    """Environments in processes, which end with this object or this process.

    Args:
        name: `FILE.py:NAME` or `PACKAGE.MODULE:NAME`: a class, or a function without arguments,
            that gives an `rl_interfaces.Environment`.
        limit_s: Most seconds of a call.
        max_groups: See `EnvironmentPool`.
        load_limit_s: Most seconds of the import.

    Raises:
        ValueError: It cannot be loaded in time; the message names key and reason.
    """

    def __init__(
        self, name: str, *, limit_s: float, max_groups: int, load_limit_s: float = LOAD_LIMIT_S
    ) -> None:
        require_name(name, key=KEY)
        self.name, self.max_groups = name, max_groups
        self._limit_s, self._load_limit_s = limit_s, load_limit_s
        self._processes: dict[int, _Process] = {}
        try:
            self._server = self._start_server()
        except _ServerError as error:
            raise ValueError(f"{KEY}={name!r} {error}") from None

    def play(self, turns: Mapping[int, Turn]) -> dict[int, dict[int, Reply] | Failure]:
        """See `EnvironmentPool`."""
        outcomes: dict[int, dict[int, Reply] | Failure] = {}
        running: dict[int, _Process] = {}
        for group, turn in turns.items():
            try:
                running[group] = self._process(group)
            except _ServerError as error:
                outcomes[group] = Failure(str(error))
                continue
            running[group].submit(turn)
        for group, outcome in _exchange(running, limit_s=self._limit_s):
            if isinstance(outcome, Failure):
                outcome = self._end(group, outcome)
            outcomes[group] = outcome
        return outcomes

    def close(self) -> None:
        """See `EnvironmentPool`."""
        for process in self._processes.values():
            process.connection.close()
        self._processes.clear()
        self._server.close()

    def _process(self, group: int) -> _Process:
        if group not in self._processes:
            if self._server.has_ended:
                _LOGGER.warning("the parent of the processes of %s=%r has died", KEY, self.name)
                self._server = self._start_server()
            self._processes[group] = self._server.fork()
        return self._processes[group]

    def _start_server(self) -> _Server:
        return _Server(self.name, limit_s=self._limit_s, load_limit_s=self._load_limit_s)

    def _end(self, group: int, failure: Failure) -> Failure:
        """End the process of a group; return the failure with its status, where it had died."""
        process = self._processes.pop(group)
        process.connection.close()
        try:
            status = self._server.end(process)
        except _ServerError as error:
            return Failure(str(error))
        return failure if failure.reason else Failure(f"its process ended with status {status}")


@dataclass(slots=True)
class _Process:
    """A process of the environments of a group, and its calls in flight."""

    pid: int
    connection: socket.socket
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    received: bytearray = field(default_factory=bytearray)
    replies: dict[int, Reply] = field(default_factory=dict)
    num_calls: int = 0
    deadline: float = 0.0

    def submit(self, turn: Turn) -> None:
        """Take the calls of a turn, for `_exchange` to send."""
        calls = [
            [episode, each if isinstance(each, str) else asdict(each)]
            for episode, each in turn.items()
        ]
        # Columns of a dataset may be dates and the like, of which an environment gets the text.
        self.unsent = memoryview(json.dumps(calls, default=str).encode() + b"\n")
        self.replies, self.num_calls = {}, len(calls)

    def events(self) -> int:
        """Return what `selectors` is to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)

    def send(self) -> None:
        self.unsent = self.unsent[self.connection.send(self.unsent) :]

    def receive(self) -> bool:
        """Take the replies that are there; return whether there were any."""
        data = self.connection.recv(1 << 20)
        if not data:
            raise ConnectionResetError
        self.received += data
        *lines, rest = self.received.split(b"\n")
        self.received = bytearray(rest)
        for line in lines:
            reply = json.loads(line)
            self.replies[reply.pop("episode")] = reply
        return bool(lines)


def _exchange(
    running: Mapping[int, _Process], *, limit_s: float
) -> Iterator[tuple[int, dict[int, Reply] | Failure]]:
    """Yield the outcome of each group as it is there.

    Args:
        running: By group, the process with its calls.
        limit_s: Most seconds between two replies of one process.

    Yields:
        Group and replies, or a failure; one without a reason where the process has died.
    """
    now = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for group, process in running.items():
            process.deadline = now + limit_s + _MARGIN_S
            selector.register(process.connection, process.events(), group)
        waiting = dict(running)
        while waiting:
            first = min(process.deadline for process in waiting.values())
            ready = selector.select(max(0.0, first - time.monotonic()))
            now = time.monotonic()
            for each, events in ready:
                process, outcome = waiting[each.data], None
                try:
                    if events & selectors.EVENT_WRITE:
                        process.send()
                    if events & selectors.EVENT_READ and process.receive():
                        process.deadline = now + limit_s + _MARGIN_S
                        outcome = _outcome(process, limit_s=limit_s)
                except (BrokenPipeError, ConnectionResetError):
                    outcome = Failure("")
                if outcome is None:
                    selector.modify(process.connection, process.events(), each.data)
                    continue
                selector.unregister(process.connection)
                del waiting[each.data]
                yield each.data, outcome
            for group, process in list(waiting.items()):
                if process.deadline <= now:
                    selector.unregister(process.connection)
                    del waiting[group]
                    yield group, Failure(_too_long(limit_s))


def _outcome(process: _Process, *, limit_s: float) -> dict[int, Reply] | Failure | None:
    """Return what a process has come to; None while it has calls to answer."""
    errors = [reply["error"] for reply in process.replies.values() if "error" in reply]
    if errors:
        return Failure(_too_long(limit_s) if errors[0] == TOO_LONG else errors[0])
    return process.replies if len(process.replies) == process.num_calls else None


def _too_long(limit_s: float) -> str:
    return f"a call took more than environment.timeout_s={limit_s:g}"


class _ServerError(Exception):
    """The parent of the processes cannot serve."""


class _Server:
    """The process that imports the user's module and forks, see `rl_policy.environments.server`.

    Args:
        name: Of the environment.
        limit_s: Most seconds of a call.
        load_limit_s: Most seconds of the import.

    Raises:
        _ServerError: It cannot be loaded in time.
    """

    def __init__(self, name: str, *, limit_s: float, load_limit_s: float) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            descriptor = str(other.fileno())
            module = "rl_policy.environments.server"
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, name, str(limit_s), descriptor],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                # Threads that a library starts at its import are not in a copy of the process.
                env={"OMP_NUM_THREADS": "1", **os.environ},
                # A terminal's Ctrl-C is for the run, which ends this process in order.
                start_new_session=True,
            )
        self._closed = weakref.finalize(self, _end_server, self._process, self._control)
        try:
            reply = self._receive(load_limit_s)
        except TimeoutError:
            self.close()
            raise _ServerError(f"took more than {load_limit_s:g} s to be loaded") from None
        if "error" in reply:
            self.close()
            raise _ServerError(f"cannot be loaded: {reply['error']}")

    @property
    def has_ended(self) -> bool:
        return not self._closed.alive or self._process.poll() is not None

    def fork(self) -> _Process:
        """Return a new process.

        Raises:
            _ServerError: There is none to be had.
        """
        own, other = socket.socketpair()
        with other:
            reply = self._ask({"fork": True}, descriptors=[other.fileno()])
        if "error" in reply:
            own.close()
            raise _ServerError(f"a process for it cannot be started: {reply['error']}")
        own.setblocking(False)
        return _Process(reply["pid"], own)

    def end(self, process: _Process) -> int:
        """Kill a process, unless it has died; return its exit status.

        Raises:
            _ServerError: The server has died, and the process with it.
        """
        return self._ask({"end": process.pid})["status"]

    def close(self) -> None:
        """End the server and all of its processes. May be called again."""
        self._closed()

    def _ask(self, request: Mapping[str, Any], *, descriptors: Sequence[int] = ()) -> Reply:
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            return self._receive(_SERVER_LIMIT_S)
        except (OSError, TimeoutError):
            self.close()
            raise _ServerError("the parent of its processes has died, and they with it") from None

    def _receive(self, limit_s: float) -> Reply:
        self._control.settimeout(limit_s)
        message = self._control.recv(MESSAGE_BYTES)
        if not message:
            self.close()
            raise _ServerError(f"ended its process with status {self._process.returncode}")
        return json.loads(message)


def _end_server(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    # It ends after its processes, unless it hangs in the import.
    end_process(process, grace_s=5.0)


class GivenEnvironment:
    """A class that a Python program gives, in the place of a name.

    Args:
        factory: Makes an `rl_interfaces.Environment`, without arguments.

    Raises:
        ValueError: It does not.
    """

    def __init__(self, factory: Callable[[], Environment]) -> None:
        self.name: str = getattr(factory, "__name__", type(factory).__name__)
        try:
            self.factory = require_environment(factory, name=self.name)
        except UnusableError as error:
            raise ValueError(f"environment={factory!r}: {error}") from None

    def __deepcopy__(self, memo: dict[int, Any]) -> GivenEnvironment:
        """Return itself: the class may have state, which is the program's."""
        return self

    def __str__(self) -> str:
        """Return what stands for it where a name would, which no file has."""
        return f"<{self.name}>"


class ThreadPool:
    """Environments of a class that this program gives, in a thread of it.

    Calls are made one after the other, as the environments may share state; those that are awaited
    wait together. A thread cannot be ended: one whose call takes too long is left to itself, with
    its group, and another one goes on with the calls of the others.

    Args:
        given: The class.
        limit_s: Most seconds of a call.
        max_groups: See `EnvironmentPool`.
    """

    def __init__(self, given: GivenEnvironment, *, limit_s: float, max_groups: int) -> None:
        self.name, self.max_groups = given.name, max_groups
        self._limit_s = limit_s
        self._host: EpisodeHost[tuple[int, int]] = EpisodeHost(given.factory, limit_s=limit_s)
        self._episodes: set[tuple[int, int]] = set()

    def play(self, turns: Mapping[int, Turn]) -> dict[int, dict[int, Reply] | Failure]:
        """See `EnvironmentPool`."""
        outcomes: dict[int, dict[int, Reply] | Failure] = {group: {} for group in turns}
        left = {
            (group, episode): Call((group, episode), argument)
            for group, turn in turns.items()
            for episode, argument in turn.items()
        }
        self._episodes |= left.keys()
        while left:
            for (group, episode), reply in self._answers(list(left.values())):
                left.pop((group, episode), None)
                outcome = outcomes[group]
                if isinstance(outcome, Failure):
                    continue
                if "error" in reply:
                    is_late = reply["error"] == TOO_LONG
                    reason = _too_long(self._limit_s) if is_late else reply["error"]
                    outcomes[group] = Failure(reason)
                    self._host.forget(each for each in self._episodes if each[0] == group)
                    continue
                outcome[episode] = reply
            left = {
                key: call for key, call in left.items() if not isinstance(outcomes[key[0]], Failure)
            }
        return outcomes

    def close(self) -> None:
        """See `EnvironmentPool`."""
        self._host.forget(self._episodes)

    def _answers(
        self, calls: Sequence[Call[tuple[int, int]]]
    ) -> Iterator[tuple[tuple[int, int], Reply]]:
        """Yield replies, up to a call that takes too long or ends its thread."""
        answers: SimpleQueue[tuple[tuple[int, int], Reply] | None] = SimpleQueue()
        host, is_left = self._host, threading.Event()

        def run() -> None:
            try:
                for answer in host.answers(calls):
                    # Its other calls are made by the thread that has taken its place.
                    if is_left.is_set():
                        return
                    answers.put(answer)
            except SystemExit:
                pass  # of the user's code: the reason is given below
            finally:
                answers.put(None)

        threading.Thread(target=run, name=f"environment {self.name}", daemon=True).start()
        answered: set[tuple[int, int]] = set()
        reason = "it ended its thread"
        try:
            while (answer := answers.get(timeout=self._limit_s + _MARGIN_S)) is not None:
                answered.add(answer[0])
                yield answer
        except Empty:
            reason = TOO_LONG
            is_left.set()
            host.renew_loop()
        unanswered = [call.key for call in calls if call.key not in answered]
        # While several are awaited, it is not known which one holds the thread.
        blamed = unanswered if host.running is None else [host.running]
        for key in blamed if unanswered else []:
            yield key, {"error": reason}


def open_pool(
    function: str | GivenEnvironment, *, limit_s: float, max_groups: int
) -> EnvironmentPool:
    """Return the environments of a name, or of a class that a Python program gives.

    Raises:
        ValueError: They cannot be loaded.
    """
    if isinstance(function, GivenEnvironment):
        return ThreadPool(function, limit_s=limit_s, max_groups=max_groups)
    return ProcessPool(function, limit_s=limit_s, max_groups=max_groups)


def probe(pool: EnvironmentPool, problem: Problem) -> None:
    """Raise `ValueError` unless an episode can start from a problem."""
    (outcome,) = pool.play({0: {0: problem}}).values()
    if isinstance(outcome, Failure):
        raise ValueError(
            f"{KEY}={pool.name!r} cannot start an episode: {outcome.reason}, for the prompt "
            f"{problem.prompt!r:.80}"
        )
