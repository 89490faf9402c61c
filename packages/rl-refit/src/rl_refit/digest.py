"""64-bit digests of buckets and tensors, sensitive to every bit and to its position."""

# xxhash and torch annotate some of their functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import xxhash

Digest = Callable[..., int]

PIECE_WORDS = 2 << 20
"""Number of 32-bit words multiplied at once: 8 MiB, so that the products stay in the cache."""


def xxh3_digest(data: torch.Tensor, *, position: int) -> int:
    """Return the xxh3_64 of `data` (`[bytes]`, uint8, on the CPU), seeded with `position`."""
    return xxhash.xxh3_64_intdigest(data.numpy().data, seed=position)


def keyed_sum_digest(data: torch.Tensor, *, position: int) -> int:
    """Return a digest that a GPU computes at memory bandwidth.

    Word `i` (32 bits, signed) of a piece of 8 MiB is multiplied by the odd 64-bit key `i`, and the
    products are added modulo 2^64. One changed word changes the sum, as an odd key has an
    inverse. Two swapped words change it by `(a - b)(k_i - k_j)`, which is 0 modulo 2^64 only if
    the keys' difference is a multiple of 2^33, as `|a - b| < 2^32`: once in 2^32 pairs of keys.
    The sums of the pieces, in order, are then hashed by xxh3_64 with the position as seed.

    Args:
        data: `[bytes]`, uint8, contiguous; the number of bytes is a multiple of 4.
        position: Index of the bucket.

    Returns:
        The same number on every device.
    """
    words = data.view(torch.int32)
    keys = _keys(data.device, PIECE_WORDS)
    products = torch.empty(min(PIECE_WORDS, len(words)), dtype=torch.int64, device=data.device)
    sums = torch.empty(-(-len(words) // PIECE_WORDS), dtype=torch.int64, device=data.device)
    for index in range(len(sums)):
        piece = words[index * PIECE_WORDS : (index + 1) * PIECE_WORDS]
        product = torch.mul(piece, keys[: len(piece)], out=products[: len(piece)])
        torch.sum(product, dim=0, out=sums[index])
    return xxhash.xxh3_64_intdigest(sums.cpu().numpy().data, seed=position)


DIGESTS: dict[str, Digest] = {"xxh3": xxh3_digest, "keyed_sum": keyed_sum_digest}


class RunningDigest:
    """The xxh3 digest of a buffer while it is filled, as long as the bytes are in the cache.

    Args:
        data: The buffer, `[bytes]`, uint8, on the CPU.
        position: Index of the bucket.

    Attributes:
        seconds: Time spent on it so far.
    """

    STEP = 1 << 20

    def __init__(self, data: torch.Tensor, *, position: int) -> None:
        self._data = data.numpy().data
        self._hash = xxhash.xxh3_64(seed=position)
        self._done = 0
        self.seconds = 0.0

    def advance(self, end: int) -> None:
        """Hash the bytes up to `end`, if there are enough new ones to be worth a call."""
        if end - self._done >= self.STEP:
            self._update(end)

    def finish(self) -> int:
        """Return the digest of the full buffer."""
        self._update(len(self._data))
        return self._hash.intdigest()

    def _update(self, end: int) -> None:
        start = time.perf_counter()
        self._hash.update(self._data[self._done : end])
        self._done = end
        self.seconds += time.perf_counter() - start


def digest_of_all(digests: Sequence[int]) -> int:
    """Return one digest of those of several buckets, in order."""
    return xxhash.xxh3_64_intdigest(np.array(digests, dtype=np.uint64).tobytes())


def tensor_digest(tensor: torch.Tensor) -> int:
    """Return the digest of a tensor's values in row-major order, computed on its device.

    Digests from a CPU and from a GPU are not comparable, as they are different functions.
    """
    data = bytes_of(tensor.detach())
    if data.device.type == "cpu":
        return xxh3_digest(data, position=0)
    if tail := len(data) % 4:
        data = torch.cat([data, data.new_zeros(4 - tail)])
    return keyed_sum_digest(data, position=0)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order, `[bytes]`, uint8: a view if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@functools.cache
def _keys(device: torch.device, count: int) -> torch.Tensor:
    # splitmix64 (Steele, Lea and Flood 2014); odd, as only an odd key has an inverse modulo 2^64.
    with np.errstate(over="ignore"):
        state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(state.view(np.int64)).to(device)
