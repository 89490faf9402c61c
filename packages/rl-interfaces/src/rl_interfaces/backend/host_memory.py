"""Copies of a model's tensors in host memory that is allocated once.

Copies from and to a GPU are fast and asynchronous where the host's memory is page-locked. torch's
allocator of such memory rounds every allocation up to a power of two, up to twice the size, and
never returns it. Here tensors are laid one after the other over blocks whose sizes are powers of
two already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK_BYTES = 2**26
"""Bytes of a block; the last one is as small as fits."""
_ALIGNMENT = 64

Piece = tuple[int, int, torch.Tensor]
"""Elements `[start, stop)` of a flattened tensor, and where they are kept."""


class HostCopies:
    """Room for a copy of each of some tensors, page-locked if one of them is on a GPU.

    Args:
        tensors: Of any shapes and dtypes; later calls have to pass the same shapes in this order.
        dtypes: What each copy is kept in. None: the tensor's own.
        block_bytes: A power of two, at least 64.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        kept = [tensor.dtype for tensor in tensors] if dtypes is None else list(dtypes)
        starts: list[int] = []
        total = 0
        for tensor, dtype in zip(tensors, kept, strict=True):
            starts.append(total)
            total += -(-tensor.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        is_pinned = any(tensor.is_cuda for tensor in tensors)
        self.blocks = [
            torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
            for size in block_sizes(total, block_bytes=block_bytes)
        ]
        self._pieces = [
            self._pieces_of(start, tensor.numel(), dtype, block_bytes=block_bytes)
            for start, tensor, dtype in zip(starts, tensors, kept, strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        """The bytes of all blocks."""
        return sum(len(block) for block in self.blocks)

    @torch.no_grad()
    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy `tensors` here, cast to what they are kept in."""
        for tensor, pieces in zip(tensors, self._pieces, strict=True):
            flat = tensor.reshape(-1)
            for start, stop, kept in pieces:
                kept.copy_(flat[start:stop], non_blocking=True)
        _wait(tensors)

    @torch.no_grad()
    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy what was read into `tensors`, in place."""
        for tensor, pieces in zip(tensors, self._pieces, strict=True):
            # Views of a tensor that is not contiguous cannot be flat.
            flat = tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()
            flat = flat.view(-1)
            for start, stop, kept in pieces:
                flat[start:stop].copy_(kept, non_blocking=True)
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))
        _wait(tensors)

    def _pieces_of(
        self, start: int, num_elements: int, dtype: torch.dtype, *, block_bytes: int
    ) -> list[Piece]:
        """Return where the elements of a tensor are, whose copy begins at byte `start`."""
        pieces: list[Piece] = []
        element = 0
        while element < num_elements:
            index, offset = divmod(start + element * dtype.itemsize, block_bytes)
            block = self.blocks[index]
            count = min((len(block) - offset) // dtype.itemsize, num_elements - element)
            kept = block[offset : offset + count * dtype.itemsize].view(dtype)
            pieces.append((element, element + count, kept))
            element += count
        return pieces


def block_sizes(num_bytes: int, *, block_bytes: int = BLOCK_BYTES) -> list[int]:
    """Return the sizes of blocks for that many bytes, each a power of two.

    Example, blocks of 1024 bytes: 2500 -> [1024, 1024, 512]
    """
    full, rest = divmod(num_bytes, block_bytes)
    tail = [max(_ALIGNMENT, 1 << (rest - 1).bit_length())] if rest else []
    return [block_bytes] * full + tail


def _wait(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for copies from and to page-locked memory, before a source may change."""
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
