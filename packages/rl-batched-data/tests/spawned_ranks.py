"""Run a function of a test module on the ranks of a gloo process group.

Under `--import-mode=importlib` a test module cannot be imported by its name from another process,
so it travels as its file and the function's name.
"""

import datetime
import importlib.util
import inspect

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from patience import PATIENCE_S


def run_on_ranks(world_size, folder, function, *arguments):
    """Call `function(*arguments, rank)` on each of `world_size` processes."""
    where = (inspect.getfile(function), function.__name__)
    mp.spawn(_run_rank, args=(world_size, folder, where, arguments), nprocs=world_size)


def _run_rank(rank, world_size, folder, where, arguments):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
    )
    try:
        _load(*where)(*arguments, rank)
    finally:
        dist.destroy_process_group()


def _load(file, name):
    spec = importlib.util.spec_from_file_location("spawned_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
