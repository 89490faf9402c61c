"""How a Megatron-core parameter is assembled from Hugging Face tensors, as slices.

A mapping is data: names, shapes and, for any tensor-parallel size, the slices of the Hugging Face
tensors that a rank's shard is concatenated from. The same slices serve to read a shard from a
checkpoint and to write it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping as Map

    import torch

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """The slice `start:stop` of a tensor along the sharded dimension."""

    source: str | None
    """Name of the Hugging Face tensor; None for `stop - start` rows of zeros."""
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.stop - self.start


class ReadSlice(Protocol):
    """Reads a slice of a Hugging Face tensor."""

    def __call__(self, name: str, *, dim: int, start: int, stop: int) -> torch.Tensor:
        """Return the slice `start:stop` of the tensor along `dim`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapping:
    """A one-to-one mapping, and the base class of the others."""

    names: tuple[str, ...]
    """The global names of the parameter: layers and experts are counted from 0 over all ranks. The
    name in local layers first, then Transformer Engine's if it differs."""
    sources: dict[str, Shape]
    """Full shapes of the Hugging Face tensors, by name. They differ in `piece_dim` only."""
    dim: int | None = None
    """The dimension sharded by tensor parallelism; None if the parameter is replicated."""
    expert: int | None = None
    """Index of the expert that it belongs to: it is on the ranks that hold this expert, sharded by
    expert-tensor parallelism. None for parameters outside of experts."""
    tied_name: str | None = None
    """Set for a tied copy of a parameter that is exported under its own mapping: the name under
    which a checkpoint may hold the tensor a second time."""

    @property
    def is_copy(self) -> bool:
        """Whether it is a tied copy, which is not exported."""
        return self.tied_name is not None

    @property
    def piece_dim(self) -> int:
        """The dimension along which pieces are concatenated."""
        return self.dim or 0

    def all_pieces(self, *, size: int, length: int) -> list[Piece]:
        """Return the pieces of all `size` shards, of `length` rows each, in rank order."""
        return [Piece(name, 0, shape[self.piece_dim]) for name, shape in self.sources.items()]

    def pieces(self, *, rank: int, size: int, length: int) -> list[Piece]:
        """Return the pieces of a rank's shard.

        Args:
            rank: The tensor-parallel rank.
            size: The tensor-parallel size.
            length: Size of each rank's shard along `piece_dim`, padding included.
        """
        if self.dim is None:
            rank, size = 0, 1
        every = self.all_pieces(size=size, length=length)
        assert total_length(every) == size * length, (self.names[0], size, length)
        return slice_pieces(every, rank * length, (rank + 1) * length)

    def shard_shape(self, size: int) -> Shape:
        """Return the shape of a rank's shard, without padding."""
        shapes = list(self.sources.values())
        shard = list(shapes[0])
        rows = sum(shape[self.piece_dim] for shape in shapes)
        shard[self.piece_dim] = rows if self.dim is None else rows // size
        return tuple(shard)

    def fill(self, shard: torch.Tensor, read: ReadSlice, *, rank: int, size: int) -> None:
        """Fill a rank's `shard` in place with the slices that it consists of."""
        offset = 0
        for piece in self.pieces(rank=rank, size=size, length=shard.shape[self.piece_dim]):
            target = shard.narrow(self.piece_dim, offset, piece.length)
            if piece.source is None:
                target.zero_()
            else:
                part = read(piece.source, dim=self.piece_dim, start=piece.start, stop=piece.stop)
                target.copy_(part)
            offset += piece.length

    def unshard(
        self, shard: torch.Tensor, into: Map[str, torch.Tensor], *, rank: int, size: int
    ) -> None:
        """Copy a rank's `shard` into its slices of the full tensors in `into`."""
        offset = 0
        for piece in self.pieces(rank=rank, size=size, length=shard.shape[self.piece_dim]):
            if piece.source is not None and piece.source in into:
                target = into[piece.source].narrow(self.piece_dim, piece.start, piece.length)
                target.copy_(shard.narrow(self.piece_dim, offset, piece.length))
            offset += piece.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary(Mapping):
    """One row per token, padded with zero rows to a multiple of the tensor-parallel size.

    No token looks the padding up and the softmax excludes its logits: it gets no gradient, and
    neither weight decay nor the optimizer's moments move it away from zero.
    """

    dim: int | None = 0

    def all_pieces(self, *, size: int, length: int) -> list[Piece]:
        """Return the rows of the tokens, and the padding."""
        ((name, shape),) = self.sources.items()
        padding = max(0, size * length - shape[0])
        return [Piece(name, 0, shape[0]), *([Piece(None, 0, padding)] if padding else [])]


@dataclass(frozen=True, kw_only=True, slots=True)
class Qkv(Mapping):
    """The fused QKV projection, interleaved by query group: queries, then key, then value.

    `sources` are `q_proj`, `k_proj` and `v_proj`, in this order; weights or biases.

    Example: 4 heads in 2 groups are `q0 q1 k0 v0 q2 q3 k1 v1`.
    """

    num_groups: int
    dim: int | None = 0

    def all_pieces(self, *, size: int, length: int) -> list[Piece]:
        """Return three pieces for each query group."""
        rows = [(name, shape[0] // self.num_groups) for name, shape in self.sources.items()]
        return [
            Piece(name, group * num_rows, (group + 1) * num_rows)
            for group in range(self.num_groups)
            for name, num_rows in rows
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class GateUp(Mapping):
    """The fused gate and up projection: each rank's shard is its gate shard, then its up shard.

    `sources` are gate and up, in this order.
    """

    dim: int | None = 0

    def all_pieces(self, *, size: int, length: int) -> list[Piece]:
        """Return two pieces for each rank."""
        half = length // 2
        return [
            Piece(name, rank * half, (rank + 1) * half)
            for rank in range(size)
            for name in self.sources
        ]


def slice_pieces(pieces: list[Piece], start: int, stop: int) -> list[Piece]:
    """Return the pieces of the rows `start:stop` of the concatenation of `pieces`.

    Example: of `[("q", 0, 4), ("k", 0, 2)]` the rows 3 to 5 are `[("q", 3, 4), ("k", 0, 1)]`.
    """
    kept: list[Piece] = []
    offset = 0
    for source, first, last in pieces:
        begin = max(first, first + start - offset)
        end = min(last, first + stop - offset)
        if begin < end:
            kept.append(Piece(source, begin, end))
        offset += last - first
    return kept


def total_length(pieces: list[Piece]) -> int:
    """Return the total number of rows of `pieces`."""
    return sum(piece.length for piece in pieces)
