"""What every case of `*_ranks.py` starts from: a worker, this rank's rows, its shards."""

import os
from contextlib import contextmanager

from rl_dtensor_worker import DTensorPolicyWorker
from rl_dtensor_worker.parallel.fsdp import full_tensor, local_tensor
from tiny_model import build_tokenizer, rows_for_rank


def this_rank():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextmanager
def worker_for(config, **options):
    worker = DTensorPolicyWorker(config, build_tokenizer(), **options)
    try:
        yield worker
    finally:
        worker.shutdown()


def parameters_of(worker):
    """Return every parameter, gathered, on the CPU. Collective."""
    return {name: full_tensor(p).cpu().clone() for name, p in worker.model.named_parameters()}


def shards_of(worker):
    """Return this rank's shard of every parameter, copied."""
    return {n: local_tensor(p).cpu().clone() for n, p in worker.model.named_parameters()}


def my_rows(batch, global_batch_size=None):
    rank, num_ranks = this_rank()
    size = global_batch_size or batch["input_ids"].shape[0]
    return rows_for_rank(batch, rank=rank, num_ranks=num_ranks, global_batch_size=size)
