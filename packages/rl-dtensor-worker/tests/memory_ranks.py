"""What the calls of a worker allocate on real ranks: the oracle of `rl_interfaces.backend.memory`.

Two ways to measure, which hold each other:

- `Storages` adds up the storages of all tensors that operators have returned, and looks at their
  sizes after every operator.
- `allocated` adds up the events of torch's CPU allocator, which also has what kernels allocate
  inside. They are those of the calling thread: with gloo, whose threads free tensors, they do not
  add up, so that it is for one rank.
"""

import gc
import os
import time
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from ranks import worker_for
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Adds up the bytes of storages that are alive, on rank 0; elsewhere it counts none."""

    def __init__(self):
        super().__init__()
        self._is_counting = os.environ["RANK"] == "0"
        self._alive = weakref.WeakSet()
        self.peak = 0

    def live(self):
        return sum(map(torch.UntypedStorage.nbytes, self._alive))

    def settled(self, unchanged_s=0.25, timeout_s=10.0):
        """Return what is alive once gloo's threads have let go of the buffers of finished calls."""
        gc.collect()  # cycles are freed whenever Python comes to it
        live, since, start = self.live(), time.monotonic(), time.monotonic()
        while (now := time.monotonic()) - since < unchanged_s and now - start < timeout_s:
            time.sleep(0.01)
            if (latest := self.live()) != live:
                live, since = latest, now
        return live

    @contextmanager
    def counting(self):
        found = SimpleNamespace()
        self.peak = self.settled()
        yield found
        found.growth, found.peak = self.settled(), self.peak

    def watch(self, tensors):
        for tensor in tensors:
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                self._alive.add(tensor.untyped_storage())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self._is_counting:
            # DTensors come back as well: no collective has another order than on rank 0.
            return (
                NotImplemented
                if any(issubclass(each, DTensor) for each in types)
                else func(*args, **kwargs)
            )
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(isinstance(each, DTensor) for each in leaves):
            return NotImplemented  # it comes back with its shards
        # Before: what FSDP has resized without an operator.
        self.peak = max(self.peak, self.live())
        out = func(*args, **kwargs)
        self.watch(tree_leaves(out))
        self.peak = max(self.peak, self.live())
        return out


@contextmanager
def allocated():
    """Add up what torch's CPU allocator gives out and takes back inside."""
    found = SimpleNamespace()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield found
    changes = sorted(
        (
            (event.start_ns(), event.nbytes())
            for event in recorded.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ),
        key=lambda change: change[0],
    )
    found.peak = found.growth = 0
    for _, change in changes:
        found.growth += change
        found.peak = max(found.peak, found.growth)


def calls_of(worker, *, rows, scored, loss, gbs):
    def gather():
        for _ in worker.weight_source:
            pass

    return {
        "score": lambda: worker.get_logprobs(scored),
        # The first one makes the optimizer's state.
        "first train": lambda: worker.train(rows, loss, gbs=gbs),
        "train": lambda: worker.train(rows, loss, gbs=gbs),
        "gather": gather,
    }


def measure_storages(*, config, **arguments):
    """Return the bytes at the peak and at the end of each call, by live storages of rank 0."""
    counter, found = Storages(), {}
    with counter, worker_for(config, init_reference_model=False, as_small=True) as worker:
        for name, call in calls_of(worker, **arguments).items():
            with counter.counting() as counted:
                call()
            found[name] = (counted.peak, counted.growth)
    return found


def measure_allocator(*, config, **arguments):
    """Return the same by the allocator's events, of a single rank."""
    found = {}
    with allocated() as load:
        context = worker_for(config, init_reference_model=False, as_small=True)
        worker = context.__enter__()
    try:
        base = load.growth
        for name, call in calls_of(worker, **arguments).items():
            with allocated() as counted:
                call()
            found[name] = (base + counted.peak, base + counted.growth)
            base += counted.growth
    finally:
        context.__exit__(None, None, None)
    return found
