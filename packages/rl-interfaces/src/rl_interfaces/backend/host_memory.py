"""Copies of a model's tensors in host memory that is allocated once.

Copies from and to a GPU are fast and asynchronous where the host's memory is page-locked. torch's
allocator of such memory rounds every allocation up to a power of two, up to twice the size, and
never returns it. Here tensors are laid one after the other over blocks whose sizes are powers of
two already: `HostCopies` may cut a tensor at the end of a block, `OffloadBuffers` keeps it whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

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
            total += _aligned(tensor.numel() * dtype.itemsize)
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


class OffloadBuffers:
    """Host memory to which tensors are offloaded again and again, page-locked for a GPU's.

    It is allocated by the first offload, and anew if the tensors have other shapes or dtypes then.
    Of page-locked memory at most an eighth and the rest of the last block are unused.
    """

    def __init__(self) -> None:
        self._views: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """The bytes that are allocated."""
        blocks = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in self._views}
        return sum(block.nbytes() for block in blocks.values())

    @torch.no_grad()
    def moved(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Return each tensor on `device`: itself if it is there, else a copy.

        A DTensor's shard is what moves. Copies to the host are all under way before one wait for
        them; they share this object's memory, so that the next offload overwrites them. Copies to a
        GPU are ordered by its current stream, and the host does not wait.
        """
        leaving = [each for each in tensors if each.device != device]
        if not leaving:
            # The memory stays for the next time.
            return [*tensors]
        shards = [_local(each) for each in leaving]
        if device.type == "cpu":
            arrived = self._views_like(shards)
            for view, shard in zip(arrived, shards, strict=True):
                view.copy_(shard, non_blocking=True)
            _wait(shards)
        else:
            arrived = [shard.to(device, non_blocking=True) for shard in shards]
        copies = iter(arrived)
        return [each if each.device == device else _like(next(copies), each) for each in tensors]

    def _views_like(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a view for each of `shards`, in the memory of the last time if they fit it."""
        kept = [(view.shape, view.stride(), view.dtype) for view in self._views]
        if kept != [(shard.shape, shard.stride(), shard.dtype) for shard in shards]:
            # The old memory is released first, unless something offloaded is still in it.
            self._views = []
            self._views = _allocate_like(shards)
        return self._views


def _allocate_like(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a host tensor of the layout of each of `shards`, each within one block."""
    spans = [_span(shard) * shard.itemsize for shard in shards]
    blocks, places = place_whole([_aligned(span) for span in spans])
    is_pinned = any(shard.is_cuda for shard in shards)
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for size in blocks]
    return [
        memory[block][offset : offset + span]
        .view(shard.dtype)
        .as_strided(shard.shape, shard.stride(), storage_offset=offset // shard.itemsize)
        for shard, span, (block, offset) in zip(shards, spans, places, strict=True)
    ]


def place_whole(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return blocks for pieces of `sizes` bytes, and each piece's block and offset in it.

    Each block is a power of two, at least eight times the largest piece, but for the last one, as
    small as fits. Example, largest piece 100: blocks of 1024 bytes.
    """
    block_bytes = _power_of_two(8 * max(sizes, default=0))
    blocks: list[int] = []
    places: list[tuple[int, int]] = []
    used = block_bytes
    for size in sizes:
        if used + size > block_bytes or not blocks:
            blocks.append(block_bytes)
            used = 0
        places.append((len(blocks) - 1, used))
        used += size
    if blocks:
        blocks[-1] = _power_of_two(used)
    return blocks, places


def block_sizes(num_bytes: int, *, block_bytes: int = BLOCK_BYTES) -> list[int]:
    """Return the sizes of blocks for that many bytes, each a power of two.

    Example, blocks of 1024 bytes: 2500 -> [1024, 1024, 512]
    """
    full, rest = divmod(num_bytes, block_bytes)
    return [block_bytes] * full + ([_power_of_two(rest)] if rest else [])


def _power_of_two(num_bytes: int) -> int:
    """Return the least power of two that is not less, nor less than the alignment."""
    return max(_ALIGNMENT, 1 << max(num_bytes - 1, 0).bit_length())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _span(tensor: torch.Tensor) -> int:
    """Return the elements from a tensor's first to its last in memory."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's shard; another tensor as it is, detached."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _like(shard: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `shard` as a DTensor if `tensor` is one, also while it is not on the mesh's device."""
    # `from_local` would move it onto the mesh's device.
    if isinstance(tensor, DTensor):
        return DTensor(shard, tensor._spec, requires_grad=False)
    return shard


def _wait(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for copies from and to page-locked memory, before a source may change."""
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
