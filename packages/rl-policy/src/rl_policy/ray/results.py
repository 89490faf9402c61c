"""A rank's result on its way to the driver: one buffer has all its numbers.

    {"global_loss": float32 [1], "rank": 0, "all_mb_metrics": {"lr": [1e-3, 1e-3]}}
    -> structure {"global_loss": <4 bytes at 0>, "rank": 0, "all_mb_metrics": {"lr": <16 at 8>}}
       numbers   uint8 [24]

Ray pickles each tensor with a storage of its own, and each number of a list as an object, which the
driver would unpickle for every rank. A `BatchedDataDict` needs no packing: its columns are buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from rl_batched_data import BatchedDataDict

# Of the largest dtype, so that a view of any starts at a multiple of its size.
_ALIGNMENT = 16


class _Numbers(NamedTuple):
    """Where the buffer has a tensor, or a list of floats."""

    start: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    """None: a list of floats."""


@dataclass(frozen=True, slots=True)
class PackedResult:
    """What `pack_result` returns."""

    structure: Any
    """The result, with `_Numbers` in place of tensors and lists of floats."""
    numbers: BatchedDataDict
    """`bytes` uint8 `[bytes]`, which the driver reads in place."""


def pack_result(result: object) -> object:
    """Return a dict of a worker as a `PackedResult`, and anything else as it is."""
    if type(result) is not dict:
        return result
    pieces: list[torch.Tensor] = []
    size = 0

    def pack(value: object) -> object:
        nonlocal size
        if type(value) is dict:
            return {key: pack(entry) for key, entry in value.items()}
        if _is_floats(value):
            tensor, shape = torch.tensor(value, dtype=torch.float64), None
        elif _is_plain(value):
            tensor, shape = value.contiguous().reshape(-1), tuple(value.shape)
        else:
            return value
        piece, start = tensor.view(torch.uint8), size
        size += -(-len(piece) // _ALIGNMENT) * _ALIGNMENT
        pieces.extend([piece, piece.new_zeros(size - start - len(piece))])
        return _Numbers(start, start + len(piece), tensor.dtype, shape)

    structure = pack(result)
    buffer = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
    return PackedResult(structure, BatchedDataDict(bytes=buffer))


def unpack_result(result: object) -> Any:
    """Return what `pack_result` was given. Tensors are read-only views of the buffer."""
    if not isinstance(result, PackedResult):
        return result
    buffer: torch.Tensor = result.numbers["bytes"]

    def unpack(value: object) -> object:
        if type(value) is dict:
            return {key: unpack(entry) for key, entry in value.items()}
        if not isinstance(value, _Numbers):
            return value
        numbers = buffer[value.start : value.end].view(value.dtype)
        return numbers.tolist() if value.shape is None else numbers.view(value.shape)

    return unpack(result.structure)


def _is_floats(value: object) -> TypeGuard[list[float]]:
    return type(value) is list and len(value) > 0 and all(type(entry) is float for entry in value)


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor is its bytes: dense, on the CPU, without a gradient."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_quantized)
        and not (value.is_conj() or value.is_neg())
    )
