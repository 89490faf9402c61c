"""The parent of environments' processes: `python -m rl_policy.environments.server NAME LIMIT_S FD`.

It imports the user's module once, and forks a process for each group of episodes, which costs a
millisecond instead of an import. It runs none of the user's code after the import, so that it is
there to end what hangs:

    driver ──[requests, JSON]──▶ server ──fork──▶ a process for each group
        └──────────────[calls and replies, JSON lines]──────────▲

Requests: `{"fork": true}` with one end of a socket pair, answered by `{"pid": ...}`; and
`{"end": pid}`, answered by `{"status": ...}`, the exit status, negative for a signal. It ends, with
all of its processes, when the driver does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from rl_interfaces import Environment

from rl_policy.data.datasets import Problem
from rl_policy.data.user_code import (
    described,
    detach_standard_streams,
    end_with_parent,
    load_attribute,
)
from rl_policy.environments.host import Call, EpisodeHost, Reply, require_environment

MESSAGE_BYTES = 1 << 16
"""Most bytes of a request or its answer."""

_ERROR_LENGTH = 4096
# How soon a process that has ended by itself is reaped.
_REAP_S = 1.0


def main() -> None:
    """Load the environment, say so, and serve until the driver's end of the socket is closed."""
    name, limit_s, control = sys.argv[1], float(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
    end_with_parent()
    detach_standard_streams()
    try:
        factory = require_environment(load_attribute(name), name=name.rpartition(":")[2])
    except Exception as error:  # the module is the user's: anything may be raised
        _send(control, {"error": described(error)[:_ERROR_LENGTH]})
        return
    # From here on it outlives the driver for as long as it takes to end its processes.
    end_with_parent(is_on=False)
    with suppress(BrokenPipeError):  # the driver has ended, or no longer waits
        _send(control, {"loaded": True})
        _Server(control, factory, limit_s=limit_s).serve()


class _Server:
    def __init__(
        self, control: socket.socket, factory: Callable[[], Environment], *, limit_s: float
    ) -> None:
        self._control, self._factory, self._limit_s = control, factory, limit_s
        self._processes: set[int] = set()
        self._statuses: dict[int, int] = {}

    def serve(self) -> None:
        """Answer requests until there are no more, then end all processes."""
        try:
            while True:
                if not select.select([self._control], [], [], _REAP_S)[0]:
                    self._reap()
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1)
                if not message:
                    return
                request = json.loads(message)
                if "fork" in request:
                    self._fork(descriptors[0])
                else:
                    _send(self._control, {"status": self._end(request["end"])})
        finally:
            for pid in tuple(self._processes):
                self._end(pid)

    def _fork(self, descriptor: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or too little memory
            _send(self._control, {"error": str(error)})
        else:
            if not pid:
                self._become_process(descriptor)
            self._processes.add(pid)
            _send(self._control, {"pid": pid})
        os.close(descriptor)

    def _become_process(self, descriptor: int) -> NoReturn:
        status = 1
        try:
            server = os.getppid()
            # A session of its own: what the environment starts ends with it.
            os.setsid()
            end_with_parent()
            self._control.close()
            # Open until the process has its status: the driver takes the end of the connection for
            # that of the process, and has it killed.
            connection = socket.socket(fileno=descriptor)
            if os.getppid() == server:
                answer_calls(connection, self._factory, self._limit_s)
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException as error:  # the server's frames below must not run here
            sys.stderr.write(f"the process of an environment ends: {described(error)}\n")
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _end(self, pid: int) -> int:
        """Kill a process with all that it has started; return its exit status."""
        self._reap()
        if pid in self._processes:
            # It may not have its session yet.
            os.kill(pid, signal.SIGKILL)
            self._take_status(pid, os.waitpid(pid, 0)[1])
        return self._statuses.pop(pid)

    def _reap(self) -> None:
        for pid in tuple(self._processes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._take_status(pid, status)

    def _take_status(self, pid: int, status: int) -> None:
        # What it had started may be left.
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._processes.remove(pid)
        self._statuses[pid] = os.waitstatus_to_exitcode(status)


def answer_calls(
    connection: socket.socket, factory: Callable[[], Environment], limit_s: float
) -> None:
    """Answer the calls of a group until its connection is closed.

    They are made in their order; those that are awaited wait beside each other and the next ones.

    Args:
        connection: Lines of JSON: `[episode, problem or text]`, and for each of these a line with
            its reply and the `episode`, as they are there.
        factory: Makes an environment.
        limit_s: See `EpisodeHost`.
    """
    host: EpisodeHost[int] = EpisodeHost(factory, limit_s=limit_s)
    received = bytearray()

    def send(episode: int, reply: Reply) -> None:
        connection.sendall(json.dumps({**reply, "episode": episode}).encode() + b"\n")

    while True:
        if host.num_awaited:
            for episode, reply in host.finished(connection):
                send(episode, reply)
            if not select.select([connection], [], [], 0)[0]:
                continue
        data = connection.recv(MESSAGE_BYTES)
        if not data:
            return
        received += data
        *lines, rest = received.split(b"\n")
        received = bytearray(rest)
        for line in lines:
            episode, argument = json.loads(line)
            argument = argument if isinstance(argument, str) else Problem(**argument)
            reply = host.begin(Call(episode, argument))
            if reply is not None:
                send(episode, reply)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
