"""Ranks that start in a fraction of a second: a server forks them once it has imported everything.

Each run has processes of its own, as Megatron-core keeps its groups and random states in globals.
"""

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from multiprocessing.connection import wait

_LIMIT_S = 240
_PRELOADED = ["rl_megatron_worker", "rl_megatron_worker.hf_export", "transformers"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run_rank(rank, num_ranks, port, connection, function, kwargs):
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        result = (True, function(**kwargs))
    except Exception as error:
        result = (False, (type(error).__name__, str(error), traceback.format_exc()))
    # By value: `send` would share a tensor's memory, which ends with the process.
    connection.send_bytes(pickle.dumps(result))


class RankFailure(AssertionError):
    """A rank raised; carries the exception's type name and text."""

    def __init__(self, rank, kind, text, trace):
        super().__init__(f"rank {rank} raised {kind}: {text}\n{trace}")
        self.kind, self.text = kind, text


class RankPool:
    """Runs a function on `num_ranks` processes at the same time."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)

    def run(self, function, **kwargs):
        """Return every rank's result, in rank order; raise the first rank's failure."""
        port = free_port()
        processes, connections = [], []
        for rank in range(self.num_ranks):
            ours, theirs = self._context.Pipe()
            arguments = (rank, self.num_ranks, port, theirs, function, kwargs)
            process = self._context.Process(target=_run_rank, args=arguments)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        try:
            return _results(connections, function.__name__)
        finally:
            _end(processes)


def _results(connections, name):
    deadline = time.monotonic() + _LIMIT_S
    results = []
    for rank, connection in enumerate(connections):
        if not wait([connection], timeout=max(deadline - time.monotonic(), 1)):
            # One that failed may be why another waits.
            _raise_failures(results)
            raise TimeoutError(f"rank {rank} of {name} gave nothing in time")
        try:
            results.append(pickle.loads(connection.recv_bytes()))
        except EOFError:
            results.append((False, ("Died", f"rank {rank} of {name} died", "")))
    _raise_failures(results)
    return [result for _, result in results]


def _raise_failures(results):
    for rank, (succeeded, result) in enumerate(results):
        if not succeeded:
            raise RankFailure(rank, *result)


def _end(processes):
    for process in processes:
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
            process.join()
