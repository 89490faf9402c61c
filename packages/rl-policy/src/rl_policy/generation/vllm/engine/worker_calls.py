"""Functions that run in vLLM's workers: each is sent to all of them, and takes the worker first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from rl_refit.compat.broadcast import BroadcastGroup
from rl_refit.compat.handles import rebuild
from rl_refit.vllm import Worker, load

if TYPE_CHECKING:
    from rl_interfaces import DeviceHandles, RefitInfo

# Each load walks over all modules of the model, so that tensors are loaded in batches.
_BATCH_BYTES = 256 << 20


class VllmWorker(Worker, Protocol):
    """The members of vLLM's worker that are used here, and the group that is stored on it."""

    rank: int
    device: torch.device
    rl_policy_group: BroadcastGroup | None


def join_group(
    worker: VllmWorker, ip: str, port: int, world_size: int, first_rank: int, timeout_s: float
) -> None:
    """Join the trainer and the other receivers in a group, instead of an earlier one.

    Args:
        worker: vLLM's.
        ip: Address of the trainer's rank 0.
        port: The port there.
        world_size: The receivers and the trainer.
        first_rank: The rank in the group of this engine's first worker.
        timeout_s: Limit of the rendezvous and of each broadcast, in seconds.
    """
    group: BroadcastGroup | None = getattr(worker, "rl_policy_group", None)
    if group is not None:
        group.close()
        worker.rl_policy_group = None
    worker.rl_policy_group = BroadcastGroup(
        ip,
        port,
        rank=first_rank + worker.rank,
        world_size=world_size,
        device=worker.device,
        timeout_s=timeout_s,
    )


def load_from_group(worker: VllmWorker, info: RefitInfo) -> None:
    """Load the tensors that the trainer broadcasts.

    Args:
        worker: vLLM's.
        info: `{name: (shape, wire dtype)}` of all tensors, in order.
    """
    group: BroadcastGroup | None = getattr(worker, "rl_policy_group", None)
    if group is None:
        raise RuntimeError("init_collective was not called: nobody sends weights")
    _load_in_batches(worker, group.receive(info))


def load_from_handles(worker: VllmWorker, handles: DeviceHandles) -> None:
    """Load the tensors of some handles.

    Args:
        worker: vLLM's.
        handles: `{device id: {name: handle}}`. A worker opens those of its own GPU, on the CPU
            those of any device.
    """
    if worker.device.type == "cuda":
        own = f"GPU-{torch.cuda.get_device_properties(worker.device).uuid}"
        if own not in handles:
            raise RuntimeError(f"there are no handles of {own}, but of {sorted(handles)}")
        chosen = handles[own]
    else:
        chosen = next(iter(handles.values()))
    tensors = ((name, rebuild(handle, worker.device)) for name, handle in chosen.items())
    _load_in_batches(worker, tensors)


def _load_in_batches(worker: VllmWorker, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    batch: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors:
        batch.append((name, tensor))
        num_bytes += tensor.nbytes
        if num_bytes >= _BATCH_BYTES:
            load(worker, batch)
            batch, num_bytes = [], 0
    if batch:
        load(worker, batch)
