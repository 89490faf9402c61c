"""A 64-bit digest of a tensor that is the sum of the digests of its shards.

The element with the bits `v` (unsigned) at `(i, j, ...)` of the *full* tensor adds
`v * W0[i] * W1[j] * ...` modulo 2^64, where each `W` has pseudo-random odd numbers that depend on
the tensor's name and the dim. This is the multilinear family of Carter and Wegman (1979), with one
key per row and column in place of one per element, so that a product by broadcast computes it.

One changed element changes the sum, as a product of odd numbers has an inverse modulo 2^64. Two
elements that have changed places change it by `(a - b)(w_p - w_q)`, and rows that have changed
places by `(W0[i] - W0[k])(S_i - S_k)`; for pseudo-random keys these are 0 about once in 2^48 for
elements of 16 bits. It guards against faults, not against an adversary, who can compute the keys.
"""

# torch and xxhash annotate some of their functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from rl_refit.resharding.slices import Box

CHUNK_ELEMENTS = 1 << 17
"""Elements multiplied at once: the products, 1 MiB, stay in the cache."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def shard_digest(data: torch.Tensor, name: str, box: Box) -> int:
    """Return the digest of a slice; digests of disjoint slices add up, modulo 2^64.

    Args:
        data: The slice's elements, of the box's shape, in any strides; any dtype.
        name: Of the full tensor.
        box: Where the slice lies in the full tensor.

    Returns:
        The same number on every device, in `[0, 2^64)`.
    """
    if not data.numel():
        return 0
    bits = data.detach().view(_BITS[data.dtype.itemsize])
    keys = [
        _keys(name, dim, start, size, data.device)
        for dim, (start, size) in enumerate(zip(*box, strict=True))
    ]
    return _contract(bits, keys) % (1 << 64)


def add_digests(digests: Sequence[int]) -> int:
    """Return the digest of disjoint slices together."""
    return sum(digests) % (1 << 64)


def _contract(bits: torch.Tensor, keys: Sequence[torch.Tensor]) -> int:
    if bits.numel() > CHUNK_ELEMENTS and bits.ndim:
        # Along the first dim with more than one index, in chunks that bound the products' memory.
        dim = next(dim for dim, size in enumerate(bits.shape) if size > 1)
        step = max(1, CHUNK_ELEMENTS * bits.shape[dim] // bits.numel())
        total = 0
        for start in range(0, bits.shape[dim], step):
            size = min(step, bits.shape[dim] - start)
            inner = [*keys[:dim], keys[dim].narrow(0, start, size), *keys[dim + 1 :]]
            total += _contract(bits.narrow(dim, start, size), inner)
        return total
    sums = bits.to(torch.int64)
    if bits.dtype in (torch.int16, torch.int32):
        sums = sums.bitwise_and_((1 << 8 * bits.dtype.itemsize) - 1)
    for key in reversed(keys):
        sums = sums.mul(key).sum(-1)
    return int(sums.item())


def _keys(name: str, dim: int, start: int, size: int, device: torch.device) -> torch.Tensor:
    # splitmix64 (Steele, Lea and Flood 2014) of the index, from a seed per tensor and dim.
    seed = np.uint64(xxhash.xxh3_64_intdigest(name.encode(), seed=dim))
    with np.errstate(over="ignore"):
        state = np.arange(start + 1, start + size + 1, dtype=np.uint64)
        state = state * np.uint64(0x9E3779B97F4A7C15) + seed
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(state.view(np.int64)).to(device)
