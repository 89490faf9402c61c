"""Ranks that stay alive between tests, forked from a server that has imported everything once.

Where there is a GPU they are spawned: CUDA cannot be used in a process whose parent has asked for
it, and what the server imports may ask for it.
"""

import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S
from rl_interfaces.backend.runtime import ReservedPort

_TESTS = Path(__file__).parent


@cache
def rank_context(num_gpus=None):
    """Return the multiprocessing context of ranks on a machine with so many GPUs (None: this one).

    Without GPUs its processes start with everything imported.
    """
    if torch.cuda.device_count() if num_gpus is None else num_gpus:
        return multiprocessing.get_context("spawn")
    multiprocessing.set_forkserver_preload(["forked_imports"])
    with pytest.MonkeyPatch.context() as patch:
        # The server ignores `sys.path`, and skips a module that it does not find without a word.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(_TESTS), *filter(None, sys.path)]))
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def _serve(rank, num_ranks, connection):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1")
    while True:
        try:
            function, port, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.environ["MASTER_PORT"] = str(port)
        try:
            result = (True, function(**kwargs))
        except Exception as error:
            result = (False, (type(error).__name__, str(error), traceback.format_exc()))
        # By value: `send` would share each tensor's memory through a socket of its own.
        connection.send_bytes(pickle.dumps(result))
        del result
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
    """`num_ranks` processes; `run` calls one function on all of them at the same time."""

    def __init__(self, num_ranks, *, num_gpus=None):
        context = rank_context(num_gpus)
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
                connection.send_bytes(pickle.dumps((function, port.number, kwargs)))
            results = self._results_of(function)
        self._raise_failures(results)
        return [result for _, result in results]

    def _results_of(self, function):
        deadline = time.monotonic() + PATIENCE_S
        results = []
        for rank, connection in enumerate(self.connections):
            if not wait([connection], timeout=max(deadline - time.monotonic(), 1)):
                # One that failed may be why another waits.
                self._raise_failures(results)
                raise TimeoutError(f"rank {rank} of {function.__name__} gave nothing in time")
            results.append(pickle.loads(connection.recv_bytes()))
        return results

    def _raise_failures(self, results):
        for rank, (succeeded, result) in enumerate(results):
            if not succeeded:
                raise RankFailure(rank, *result)

    def close(self):
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(timeout=PATIENCE_S)
            if process.is_alive():
                process.kill()
