"""What every case of `*_ranks.py` starts from: a worker, this rank's rows, its shards."""

import os
from contextlib import contextmanager
from unittest import mock

from rl_dtensor_worker import DTensorPolicyWorker
from rl_dtensor_worker.parallel import mesh
from rl_dtensor_worker.parallel.fsdp import full_tensor, local_tensor
from tiny_model import build_tokenizer, rows_for_rank


def this_rank():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextmanager
def worker_for(config, *, as_small=False, **options):
    """Run the body with a worker.

    The models here are small; sharded layer by layer they are what large ones are. `as_small`, or
    replicas by the model's size, leaves them as a run has them.
    """
    automatic = config.get("dtensor_cfg", {}).get("data_parallel_replicate_size") == "auto"
    limit = mesh._SMALL_BYTES if as_small or automatic else 0
    with mock.patch.object(mesh, "_SMALL_BYTES", limit):
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
