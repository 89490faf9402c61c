"""Two ranks of a worker that talk to nobody, in processes of their own."""

import multiprocessing
import os
import traceback
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_S
from plain_conformance_case import plain_case
from plain_policy_worker import PlainWorker
from rl_interfaces import ParallelLayout
from rl_interfaces.backend.runtime import ReservedPort
from rl_interfaces.testing import check_worker

RULES = [
    "a_worker_says_where_it_is",
    "a_layout_is_of_all_ranks",
    "a_process_group_is_left_by_whoever_joined_it",
]


class Twin(PlainWorker):
    """Every rank of one tensor-parallel group does the same."""

    @staticmethod
    def validate_config(config, *, world_size, init_optimizer=True):
        PlainWorker.validate_config(config, world_size=world_size)
        return ParallelLayout(data_parallel=1, tensor_parallel=world_size)


class AlwaysTheFirst(Twin):
    def get_gpu_info(self):
        return {"rank": 0}


class NeverAlive(Twin):
    def is_alive(self):
        return False


class DataParallel(PlainWorker):
    """Each rank has rows of its own, and the ranks sum their counts, losses and gradients."""

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        return super().train(data, loss_fn, eval_mode, gbs // dist.get_world_size(), mbs)

    def counts(self, rows):
        counts = torch.stack(super().counts(rows))
        dist.all_reduce(counts)
        return counts.unbind()

    def step_loss(self, *arguments):
        loss = super().step_loss(*arguments)
        dist.all_reduce(loss)
        return loss

    def step(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        return super().step()

    def save_hf_checkpoint(self, path):
        """Written by the first rank alone, and whole when any rank returns."""
        if self.rank == 0:
            super().save_hf_checkpoint(path)
        dist.barrier()


class CountingItsOwnSequences(DataParallel):
    def counts(self, rows):
        _, tokens = super().counts(rows)
        return rows["sample_mask"].sum(), tokens


def check_on_rank(connection, rank, port, directory, worker_class, rules):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        (directory / str(rank)).mkdir()
        case = plain_case(directory / str(rank), worker_class)
        connection.send(check_worker(case, directory=directory, only=rules))
    except Exception:
        connection.send(traceback.format_exc())


@cache
def forked():
    """Return the context of processes that are forked from one that has imported this module."""
    multiprocessing.set_forkserver_preload([Path(__file__).stem])
    with pytest.MonkeyPatch.context() as patch:
        # The server ignores `sys.path`, and skips a module that it does not find without a word.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def check_on_two_ranks(directory, worker_class, rules=RULES):
    """Return what both ranks report, or the text of their error."""
    port = ReservedPort()
    context = forked()
    ends, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        arguments = (theirs, rank, port.number, directory, worker_class, rules)
        processes.append(context.Process(target=check_on_rank, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    try:
        return [
            end.recv() if wait([end], timeout=PATIENCE_S) else "nothing in time" for end in ends
        ]
    finally:
        for process in processes:
            process.join(timeout=PATIENCE_S)
            process.kill()
        port.close()
