"""Exchange the columns of a batch between the ranks of a process group."""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from rl_batched_data.columns import Column


def gather_columns(
    entries: Mapping[str, Column], group: dist.ProcessGroup | None
) -> list[dict[str, Column]]:
    """Return the entries of every rank of `group`, in rank order.

    Tensors travel as bytes, filled up to the largest rank's; everything else is pickled.
    """
    described = {
        key: (list(column.shape), column.dtype) if isinstance(column, torch.Tensor) else column
        for key, column in entries.items()
    }
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, described, group=group)
    for rank, theirs in enumerate(everyone):
        if odd := _tensor_keys(theirs) ^ _tensor_keys(described):
            raise ValueError(f"rank {rank} and this one differ in the keys {sorted(odd)}")
    # In one order on every rank, whichever order each has them in.
    for key, column in sorted(entries.items()):
        if isinstance(column, torch.Tensor):
            for theirs, tensor in zip(
                everyone, _gather_tensor(column, [t[key] for t in everyone], group), strict=True
            ):
                theirs[key] = tensor
    return everyone


def _tensor_keys(described: Mapping[str, Any]) -> set[str]:
    return {key for key, value in described.items() if isinstance(value, tuple)}


def _gather_tensor(
    tensor: torch.Tensor,
    described: list[tuple[list[int], torch.dtype]],
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor]:
    lengths = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in described]
    own = tensor.contiguous().flatten().view(torch.uint8)
    sent = own.new_zeros(max(lengths))
    sent[: len(own)] = own
    received = [torch.empty_like(sent) for _ in described]
    dist.all_gather(received, sent, group=group)
    return [
        buffer[:length].view(dtype).view(shape)
        for buffer, length, (shape, dtype) in zip(received, lengths, described, strict=True)
    ]
