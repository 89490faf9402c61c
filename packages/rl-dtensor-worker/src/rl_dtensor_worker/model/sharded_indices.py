"""Which part of a whole tensor this rank's shard is."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def owned_indices(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return, per dimension, the rising indices of the whole tensor that this rank holds.

    Any placement on any mesh: with tensor and data parallelism on one dimension, a rank's rows
    need not follow each other.
    """
    indices = [torch.arange(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for placement, ranks, rank in zip(
            tensor.placements, tensor.device_mesh.shape, coordinate, strict=True
        ):
            if placement.is_shard() or isinstance(placement, _StridedShard):
                dim: int = placement.dim  # type: ignore[attr-defined]
                parts, _ = _along_rows(placement)._split_tensor(
                    indices[dim], ranks, with_padding=False
                )
                indices[dim] = parts[rank]
    return indices


def _along_rows(placement: Any) -> Any:
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)
