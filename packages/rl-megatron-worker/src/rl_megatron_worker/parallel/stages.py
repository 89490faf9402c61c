"""Broadcasts of the last pipeline stage's results to the other stages."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rl_interfaces.backend.engine import Scored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Tensors = dict[str, torch.Tensor]


def broadcast_from_last_stage(value: Any, *, device: torch.device) -> Any:
    """Return the last stage's value on every stage, encoded as JSON. Collective.

    Args:
        value: A JSON-serialisable value; ignored on stages before the last.
        device: The device of the process group's backend.
    """
    group, last, is_last = _last_stage()
    if group.size() == 1:
        return value
    encoded = json.dumps(value).encode() if is_last else b""
    size = torch.tensor([len(encoded)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=last, group=group)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if is_last:
        data.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
    dist.broadcast(data, src=last, group=group)
    return value if is_last else json.loads(bytes(data.tolist()))


def broadcast_tensors_from_last_stage(
    tensors: Mapping[str, torch.Tensor], *, device: torch.device
) -> Tensors:
    """Return the last stage's tensors on every stage. Collective.

    Args:
        tensors: Ignored on stages before the last.
        device: The device of the process group's backend, and of the results.
    """
    group, last, is_last = _last_stage()
    if group.size() == 1:
        return dict(tensors)
    specs = {
        name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()
    }
    received: Tensors = {}
    for name, (shape, dtype) in broadcast_from_last_stage(specs, device=device).items():
        if is_last:
            # gloo corrupts non-contiguous tensors in a broadcast without an error.
            data = tensors[name].to(device).contiguous()
        else:
            data = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        dist.broadcast(data, src=last, group=group)
        received[name] = data
    return received


def broadcast_scored(found: Sequence[Scored], *, device: torch.device) -> list[Scored]:
    """Return the last stage's results of all micro-batches on every stage. Collective.

    Args:
        found: Ignored on stages before the last. The metrics have to be JSON-serialisable, see
            `with_plain_metrics`.
        device: The device of the process group's backend.

    Returns:
        The results, with their tensors on `device`.
    """
    metrics = broadcast_from_last_stage([each.metrics for each in found], device=device)
    # The names carry the index, so that the shapes of all micro-batches are sent at once.
    named = {
        f"{index}/{name}": tensor
        for index, each in enumerate(found)
        for name, tensor in each.tensors.items()
    }
    results = [Scored(metrics=each) for each in metrics]
    for key, tensor in broadcast_tensors_from_last_stage(named, device=device).items():
        index, _, name = key.partition("/")
        results[int(index)].tensors[name] = tensor
    return results


def with_plain_metrics(scored: Scored) -> Scored:
    """Return the result with metrics that `broadcast_scored` can send.

    Call it where an exception is deferred: the other stages wait for the broadcast.

    Raises:
        TypeError: A metric is not JSON-serialisable; the message names it.
    """
    metrics: dict[str, Any] = {}
    for name, value in scored.metrics.items():
        metrics[name] = value
        try:
            json.dumps(metrics[name])
        except TypeError as error:
            raise TypeError(f"the loss's metric {name!r} is {value!r}: {error}") from error
    return replace(scored, metrics=metrics)


def _last_stage() -> tuple[dist.ProcessGroup, int, bool]:
    """Return the group of stages, the global rank of the last, and whether it is this one."""
    group = cast("dist.ProcessGroup", parallel_state.get_pipeline_model_parallel_group())
    last = dist.get_global_rank(group, group.size() - 1)
    return group, last, dist.get_rank() == last
