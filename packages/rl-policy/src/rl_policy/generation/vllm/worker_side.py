"""What vLLM's workers run when weights come.

Each function is sent to every worker of an engine, and takes the worker first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch

# Loading a tensor at a time would cost a walk over the model for each.
_BATCH_BYTES = 256 << 20


def join_group(
    worker: Any, ip: str, port: int, world_size: int, first_rank: int, timeout_s: float
) -> None:
    """Meet the trainer and the other receivers at an address of the trainer's rank 0.

    Args:
        worker: vLLM's.
        ip: The address.
        port: The port there.
        world_size: The receivers and the trainer.
        first_rank: The rank in the group of this engine's first worker.
        timeout_s: Most seconds to wait, now and in each broadcast.
    """
    leave_group(worker)
    worker.rl_policy_group = import_module("rl_refit.compat.broadcast").BroadcastGroup(
        ip,
        port,
        rank=first_rank + worker.rank,
        world_size=world_size,
        device=worker.device,
        timeout_s=timeout_s,
    )


def leave_group(worker: Any) -> None:
    """Leave the group, where there is one."""
    group = getattr(worker, "rl_policy_group", None)
    if group is not None:
        group.close()
        worker.rl_policy_group = None


def load_from_group(worker: Any, info: Mapping[str, Any]) -> None:
    """Load what the trainer broadcasts.

    Args:
        worker: vLLM's.
        info: `{name: (shape, wire dtype)}` of everything, in order.
    """
    group = getattr(worker, "rl_policy_group", None)
    if group is None:
        raise RuntimeError("init_collective was not called: nobody sends weights")
    _load(worker, group.receive(info))


def load_from_handles(worker: Any, handles: Mapping[str, Mapping[str, Any]]) -> None:
    """Load the tensors behind some handles.

    Args:
        worker: vLLM's.
        handles: `{device id: {name: handle}}`, of which those of the worker's own GPU are taken;
            on the CPU any will do.
    """
    rebuild = import_module("rl_refit.compat.handles").rebuild
    if worker.device.type == "cuda":
        own = f"GPU-{torch.cuda.get_device_properties(worker.device).uuid}"
        if own not in handles:
            raise RuntimeError(f"there are no handles of {own}, but of {sorted(handles)}")
        chosen = handles[own]
    else:
        chosen = next(iter(handles.values()))
    _load(worker, ((name, rebuild(handle, worker.device)) for name, handle in chosen.items()))


def _load(worker: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    load = import_module("rl_refit.vllm").load
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
