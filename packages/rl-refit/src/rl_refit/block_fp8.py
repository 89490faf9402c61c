"""Block-FP8: matrices in 8-bit floats, with one scale per block of 128 x 128.

The format is that of DeepSeek-V3 (arXiv:2412.19437, section 3.3) and of the `*-FP8` checkpoints on
the hub: `X` in float8_e4m3fn and `X_scale_inv` in float32, whose product is the value. vLLM holds a
model so when its checkpoint does, and takes new weights in the same two tensors.

Shards are quantised before they are gathered. A block may lie on several ranks, so these agree on
its largest value first:

    values = block_maxima(shard, shape, start)     each rank, [blocks, blocks]
    all-reduce of the maxima
    scales = scales_of(maxima)
    quantize_shard(shard, scales, start)           each rank, a byte per element
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

SCALES = "_scale_inv"
"""What follows a tensor's name in the name of its scales."""
BLOCK = 128
"""Rows, and columns, that share a scale."""
DTYPE = torch.float8_e4m3fn

_LARGEST = torch.finfo(DTYPE).max


def scales_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a `[..., rows, columns]` tensor."""
    *batch, rows, columns = shape
    return (*batch, -(-rows // BLOCK), -(-columns // BLOCK))


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor in float8, and its scales.

    Args:
        values: `[..., rows, columns]`, floating-point.

    Returns:
        `[..., rows, columns]` float8_e4m3fn, and `scales_shape` float32.
    """
    scales = scales_of(block_maxima(values, values.shape))
    return quantize_shard(values, scales), scales


def dequantize(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of a tensor that `quantize` returned."""
    return quantized.float() * _spread(scales, quantized.shape, (0, 0))


def block_maxima(
    shard: torch.Tensor, shape: torch.Size | tuple[int, ...], start: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Return the largest absolute value of each block, as far as a shard knows.

    Args:
        shard: `[..., rows, columns]`, floating-point.
        shape: Of the full tensor.
        start: The full tensor's row and column with which the shard begins.

    Returns:
        `scales_shape(shape)` float32; 0 for the blocks that the shard has no part of.
    """
    maxima = torch.zeros(scales_shape(shape), device=shard.device)
    if not shard.numel():
        return maxima
    # Filled with zeros to whole blocks, which leaves a maximum of absolute values as it is.
    (row, rows), (column, columns) = (
        (begin % BLOCK, shard.shape[dim]) for dim, begin in zip((-2, -1), start, strict=True)
    )
    filled = pad(shard.abs(), (column, -(column + columns) % BLOCK, row, -(row + rows) % BLOCK))
    height, width = (filled.shape[dim] // BLOCK for dim in (-2, -1))
    blocks = filled.view(*filled.shape[:-2], height, BLOCK, width, BLOCK).amax((-3, -1))
    top, left = (begin // BLOCK for begin in start)
    maxima[..., top : top + height, left : left + width] = blocks
    return maxima


def scales_of(maxima: torch.Tensor) -> torch.Tensor:
    """Return the scales that map each block's largest value to the largest of float8."""
    scales = maxima / _LARGEST
    # Blocks of zeros, or of values so small that their scale is rounded to zero, have scale 1.
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def quantize_shard(
    shard: torch.Tensor, scales: torch.Tensor, start: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Return a shard in float8.

    Args:
        shard: `[..., rows, columns]`, floating-point.
        scales: Of the full tensor.
        start: The full tensor's row and column with which the shard begins.
    """
    scaled = shard.float() / _spread(scales, shard.shape, start)
    # Rounding may pass the largest value, for which a cast would give NaN.
    return scaled.clamp_(-_LARGEST, _LARGEST).to(DTYPE)


def _spread(scales: torch.Tensor, shape: torch.Size, start: tuple[int, int]) -> torch.Tensor:
    """Return the scale of each element of a shard of that shape."""
    for dim, begin in zip((-2, -1), start, strict=True):
        place = torch.arange(begin, begin + shape[dim], device=scales.device) // BLOCK
        scales = scales.index_select(dim, place)
    return scales
