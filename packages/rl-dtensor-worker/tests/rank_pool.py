"""Processes that stay alive between tests, so that torch and transformers load once."""

import gc
import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import wait

from rl_interfaces.backend.runtime import ReservedPort

_LIMIT_S = 240


def _serve(rank, num_ranks, connection):
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1")
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        function, port, kwargs = task
        os.environ["MASTER_PORT"] = str(port)
        try:
            connection.send((True, function(**kwargs)))
        except Exception as error:
            connection.send((False, (type(error).__name__, str(error), traceback.format_exc())))
        # A worker's modules refer to each other, and to groups, whose threads wake all the time.
        # What is alive now, modules and caches above all, need not be looked through again.
        gc.collect()
        gc.freeze()


class RankFailure(AssertionError):
    """A rank raised; carries the exception's type name and text."""

    def __init__(self, rank, kind, text, trace):
        super().__init__(f"rank {rank} raised {kind}: {text}\n{trace}")
        self.kind, self.text = kind, text


class RankPool:
    """`num_ranks` spawned processes; `run` calls one function on all of them at the same time."""

    def __init__(self, num_ranks):
        context = multiprocessing.get_context("spawn")
        self.num_ranks = num_ranks
        self.processes, self.connections = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_ranks, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def run(self, function, **kwargs):
        """Return every rank's result, in rank order; raise the first rank's failure."""
        with ReservedPort() as port:
            for connection in self.connections:
                connection.send((function, port.number, kwargs))
            results = self._results_of(function)
        self._raise_failures(results)
        return [result for _, result in results]

    def _results_of(self, function):
        deadline = time.monotonic() + _LIMIT_S
        results = []
        for rank, connection in enumerate(self.connections):
            if not wait([connection], timeout=max(deadline - time.monotonic(), 1)):
                # One that failed may be why another waits.
                self._raise_failures(results)
                raise TimeoutError(f"rank {rank} of {function.__name__} gave nothing in time")
            results.append(connection.recv())
        return results

    def _raise_failures(self, results):
        for rank, (succeeded, result) in enumerate(results):
            if not succeeded:
                raise RankFailure(rank, *result)

    def close(self):
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
