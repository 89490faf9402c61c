"""A worker that tells where it runs, works with its peers, and fails in every way on demand."""

import os
import signal
import time
from datetime import timedelta

import ray
import torch
from patience import PATIENCE_S

# What a module that asks for a GPU at its import sees, as Megatron-core's do.
AT_IMPORT = dict(os.environ)
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class UnpicklableError(Exception):
    def __init__(self, left, right):
        super().__init__(f"{left} and {right}")


def refuse():
    raise ValueError("this cannot be read")


class Unreadable:
    """An argument that is sent, and cannot be unpickled."""

    def __reduce__(self):
        return refuse, ()


class ProbeWorker:
    def __init__(self, pid_dir=None, fail_on_rank=None, hang_on_rank=None, greeting="hello"):
        self.rank = int(os.environ["RANK"])
        if pid_dir is not None:
            with open(os.path.join(pid_dir, str(os.getpid())), "w"):
                pass
        if self.rank == fail_on_rank:
            raise KeyError("no such model")
        if self.rank == hang_on_rank:
            time.sleep(3600)
        self.greeting = greeting

    def describe(self):
        keys = (*ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        return {
            "pid": os.getpid(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "greeting": self.greeting,
            "num_threads": torch.get_num_threads(),
            "gpus_at_import": AT_IMPORT.get("CUDA_VISIBLE_DEVICES"),
            **{key: os.environ.get(key) for key in keys},
        }

    def all_reduce(self, value=0.0):
        # Imported where it is used: most tests need no process group, and start faster without.
        import torch.distributed as dist

        if not dist.is_initialized():
            torch.set_num_threads(1)
            dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
        total = torch.tensor([value + self.rank])
        dist.all_reduce(total)
        return total.item()

    def echo(self, shard, suffix=""):
        return (self.rank, shard["word"], suffix)

    def fail(self, ranks, then_reduce=False, others_take_s=0.0):
        if self.rank in ranks:
            raise ValueError(f"rank {self.rank} does not like this")
        time.sleep(others_take_s)
        if then_reduce:
            self.all_reduce()

    def fail_unpicklable(self):
        raise UnpicklableError("this", "that")

    def fail_with_lambda(self):
        error = RuntimeError("holds a lambda")
        error.what = lambda: None
        raise error

    def die(self, ranks):
        if self.rank in ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        self.all_reduce()

    def sleep(self, seconds, ranks=None):
        if ranks is None or self.rank in ranks:
            time.sleep(seconds)

    def shutdown(self):
        pass


class StubbornWorker(ProbeWorker):
    def shutdown(self):
        raise RuntimeError("will not leave")
