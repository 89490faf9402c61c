"""Ranks that start in a fraction of a second: a server forks them once it has imported everything.

Each run has processes of its own, as Megatron-core keeps its groups and random states in globals.
Where there is a GPU they are spawned: Megatron-core asks for CUDA when it is imported, after which
no fork can use it.
"""

import multiprocessing
import os
import pickle
import time
import traceback
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S
from torch.distributed import TCPStore

_TESTS = Path(__file__).parent


def _run_rank(rank, num_ranks, port, connection, function, kwargs):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # The store is there already, as under torchrun: no rank waits until another has opened it.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
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


@cache
def _rank_context(num_gpus=None):
    """Return the multiprocessing context of ranks on a machine with so many GPUs (None: this one).

    Without GPUs its processes are forked from a server with everything imported.
    """
    if torch.cuda.device_count() if num_gpus is None else num_gpus:
        return multiprocessing.get_context("spawn")
    multiprocessing.set_forkserver_preload(["forked_imports"])
    with pytest.MonkeyPatch.context() as patch:
        # The server ignores `sys.path`, and skips a module that it does not find without a word.
        patch.setenv("PYTHONPATH", str(_TESTS))
        # Megatron-core has a router's count of tokens compiled, anew in each process.
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


class RankPool:
    """Runs a function on `num_ranks` processes at the same time."""

    def __init__(self, num_ranks, *, num_gpus=None):
        self.num_ranks = num_ranks
        self._context = _rank_context(num_gpus)

    def run(self, function, **kwargs):
        """Return every rank's result, in rank order; raise the first rank's failure."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes, connections = [], []
        for rank in range(self.num_ranks):
            ours, theirs = self._context.Pipe()
            arguments = (rank, self.num_ranks, store.port, theirs, function, kwargs)
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
    deadline = time.monotonic() + PATIENCE_S
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
        process.join(timeout=PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join()
