"""The processes that try the columns: they stay alive between tries, and are replaced if one hangs.

A try that gives nothing in time, or ends its process, is a crash of that column alone.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch
from rl_interfaces.backend.runtime import ReservedPort

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_LIMIT_S = 120
# What a rank still waits for the others once one has its result: they may be stuck without it.
_GRACE_S = 20


class Ranks:
    """`num_ranks` processes that call one function at the same time.

    Args:
        num_ranks: How many.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._running: list[tuple[BaseProcess, Connection]] = []

    def run(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """Return what each rank returns.

        Raises:
            ChildProcessError: A rank ended, raised, or gave nothing in time.
        """
        if not self._running:
            self._start()
        try:
            with ReservedPort() as port:
                for _, connection in self._running:
                    connection.send((function, arguments, port.number))
                return self._results()
        except ChildProcessError:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._running:
            connection.close()
            process.kill()
            process.join()
        self._running = []

    def _start(self) -> None:
        multiprocessing.set_forkserver_preload(["checks.zoo.columns"])
        context = multiprocessing.get_context("forkserver")
        for rank in range(self._num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._num_ranks, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._running.append((process, ours))

    def _results(self) -> list[Any]:
        deadline = time.monotonic() + _LIMIT_S
        results: dict[int, Any] = {}
        while len(results) < self._num_ranks:
            waiting = [each for _, each in self._running if each.fileno() not in results]
            ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                raise ChildProcessError("a rank gives nothing in time" + _seen(results))
            for connection in waiting:
                if connection not in ready:
                    continue
                try:
                    succeeded, result = connection.recv()
                except EOFError as error:
                    raise ChildProcessError("a rank has ended" + _seen(results)) from error
                if not succeeded:
                    raise ChildProcessError(result)
                results[connection.fileno()] = result
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        return [results[connection.fileno()] for _, connection in self._running]


def _seen(results: dict[int, Any]) -> str:
    return f" (another: {next(iter(results.values()))})" if results else ""


def _serve(rank: int, num_ranks: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1")
    # What models print and warn of would break the lines of the run.
    with open(os.devnull, "w") as nothing:
        for output in (sys.stdout, sys.stderr):
            os.dup2(nothing.fileno(), output.fileno())
    while True:
        try:
            function, arguments, port = connection.recv()
        except EOFError:
            return
        os.environ["MASTER_PORT"] = str(port)
        try:
            result = (True, function(*arguments))
        except Exception as error:
            result = (False, f"{type(error).__name__}: {error}")
        connection.send(result)
        gc.collect()
