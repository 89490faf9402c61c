"""The driver's side of users' environments: a process for each group, and what becomes of failures.

An environment that hangs, raises or dies costs its group: the calls of that group give a `Failure`,
its process is ended, and the next episode of the group has a new one.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias

from rl_interfaces import Environment

from rl_policy.data.datasets import Problem
from rl_policy.data.user_code import UnusableError, end_process, require_name
from rl_policy.environments.exchange import (
    MARGIN_S,
    CallExchange,
    Failure,
    NoProcessError,
    Process,
    too_long,
)
from rl_policy.environments.host import TOO_LONG, Call, EpisodeHost, Reply, require_environment
from rl_policy.environments.server import MESSAGE_BYTES

KEY = "environment.function"

LOAD_LIMIT_S = 600.0
"""Most seconds of the import of an environment, which happens once, and may be torch's."""

# A fork takes milliseconds, unless the machine has no memory left.
_SERVER_LIMIT_S = 300.0

_LOGGER = logging.getLogger(__name__)

Turn: TypeAlias = Mapping[int, Problem | str]
"""Of a group: by episode, a problem to start from, or the policy's text."""


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
            that gives an `rl_interfaces.Environment`; or an agent, see `environments.agents`.
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
        self._processes: dict[int, Process] = {}
        # The server of each process, which may have ended.
        self._parents: dict[int, _Server] = {}
        # Of the processes and the server, whose answers are in the order of its requests.
        self._lock = threading.Lock()
        try:
            self._server = self._start_server()
        except NoProcessError as error:
            raise ValueError(f"{KEY}={name!r} {error}") from None

    def play(self, turns: Mapping[int, Turn]) -> dict[int, dict[int, Reply] | Failure]:
        """See `EnvironmentPool`."""
        outcomes: dict[int, dict[int, Reply] | Failure] = {group: {} for group in turns}
        with self.exchange() as exchange:
            for group, turn in turns.items():
                for episode, argument in turn.items():
                    exchange.submit(group, episode, argument)
            while exchange.num_waiting:
                for group, received in exchange.collect(timeout_s=self._limit_s + MARGIN_S):
                    outcome = outcomes[group]
                    if isinstance(received, Failure):
                        outcomes[group] = received
                    elif not isinstance(outcome, Failure):
                        outcome.update(received)
        return outcomes

    def exchange(self, *, first_group: int = 0) -> CallExchange:
        """Return an exchange of calls that nobody waits for; it may be used from another thread.

        Args:
            first_group: Added to the numbers of its groups. Two exchanges at a time share none.
        """
        return CallExchange(self, first_group=first_group, limit_s=self._limit_s)

    def close(self) -> None:
        """See `EnvironmentPool`."""
        for process in self._processes.values():
            process.connection.close()
        self._processes.clear()
        self._server.close()

    def process(self, group: int, *, starts: bool) -> Process:
        """Return the process of a group, which is started if there is none.

        Args:
            group: The group.
            starts: Whether its episodes start: they do not need a process that has died with its
                parent, as others do, which have lost what was in it.

        Raises:
            NoProcessError: There is none to be had.
        """
        with self._lock:
            if starts and group in self._processes and self._parents[group].has_ended:
                self._processes.pop(group).connection.close()
            if group not in self._processes:
                if self._server.has_ended:
                    _LOGGER.warning("the parent of the processes of %s=%r has died", KEY, self.name)
                    self._server = self._start_server()
                self._processes[group] = self._server.fork()
                self._parents[group] = self._server
            return self._processes[group]

    def _start_server(self) -> _Server:
        return _Server(self.name, limit_s=self._limit_s, load_limit_s=self._load_limit_s)

    def end(self, group: int, failure: Failure) -> Failure:
        """End the process of a group; return the failure with its status, where it had died."""
        with self._lock:
            process = self._processes.pop(group)
            process.connection.close()
            try:
                # Its own: another server that has taken the place of this one knows no such child.
                status = self._parents[group].end(process)
            except NoProcessError as error:
                return Failure(str(error))
        return failure if failure.reason else Failure(f"its process ended with status {status}")


class _Server:
    """The process that imports the user's module and forks, see `rl_policy.environments.server`.

    Args:
        name: Of the environment.
        limit_s: Most seconds of a call.
        load_limit_s: Most seconds of the import.

    Raises:
        NoProcessError: It cannot be loaded in time.
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
            raise NoProcessError(f"took more than {load_limit_s:g} s to be loaded") from None
        if "error" in reply:
            self.close()
            raise NoProcessError(f"cannot be loaded: {reply['error']}")

    @property
    def has_ended(self) -> bool:
        return not self._closed.alive or self._process.poll() is not None

    def fork(self) -> Process:
        """Return a new process.

        Raises:
            NoProcessError: There is none to be had.
        """
        own, other = socket.socketpair()
        with other:
            reply = self._ask({"fork": True}, descriptors=[other.fileno()])
        if "error" in reply:
            own.close()
            raise NoProcessError(f"a process for it cannot be started: {reply['error']}")
        own.setblocking(False)
        return Process(reply["pid"], own)

    def end(self, process: Process) -> int:
        """Kill a process, unless it has died; return its exit status.

        Raises:
            NoProcessError: The server has died, and the process with it.
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
            raise NoProcessError("the parent of its processes has died, and they with it") from None

    def _receive(self, limit_s: float) -> Reply:
        self._control.settimeout(limit_s)
        message = self._control.recv(MESSAGE_BYTES)
        if not message:
            self.close()
            raise NoProcessError(f"ended its process with status {self._process.returncode}")
        return json.loads(message)


def _end_server(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    # It ends after its processes, unless it hangs in the import.
    end_process(process, grace_s=5.0)


class GivenEnvironment:
    """A class that a Python program gives, in the place of a name.

    Args:
        factory: Makes an `rl_interfaces.Environment`, without arguments; or an agent.

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
                    reason = too_long(self._limit_s) if is_late else reply["error"]
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
            while (answer := answers.get(timeout=self._limit_s + MARGIN_S)) is not None:
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


def probe(pool: EnvironmentPool, problem: Problem) -> Reply:
    """Return the reply to the reset of an episode from a problem.

    Raises:
        ValueError: There is none.
    """
    (outcome,) = pool.play({0: {0: problem}}).values()
    if isinstance(outcome, Failure):
        raise ValueError(
            f"{KEY}={pool.name!r} cannot start an episode: {outcome.reason}, for the prompt "
            f"{problem.prompt!r:.80}"
        )
    return outcome[0]
