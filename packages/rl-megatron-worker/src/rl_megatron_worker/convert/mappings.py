"""Which Hugging Face tensors make a parameter of Megatron-core, said row by row.

A mapping is data: names, shapes and, for any number of tensor-parallel ranks, the pieces of the
Hugging Face tensors that a rank's shard is made of, one after the other. The same pieces serve to
read a shard from a checkpoint and to write it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rl_megatron_worker.convert.pieces import Piece, cut, total_length

if TYPE_CHECKING:
    from collections.abc import Mapping as Map

    import torch

Shape = tuple[int, ...]


class ReadSlice(Protocol):
    """Reads a part of a Hugging Face tensor."""

    def __call__(self, name: str, *, dim: int, start: int, stop: int) -> torch.Tensor:
        """Return what of the tensor lies between `start` and `stop` in `dim`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapping:
    """One tensor of each side. The base of all kinds of mappings."""

    names: tuple[str, ...]
    """What Megatron-core calls the parameter in an undivided model: layers and experts are counted
    from 0 over all ranks. The local layers' name first, then Transformer Engine's if it differs."""
    sources: dict[str, Shape]
    """The whole Hugging Face tensors, by name. All are alike but for the dimension `axis`."""
    dim: int | None = None
    """The dimension that tensor-parallel ranks cut; None where each has the whole parameter."""
    expert: int | None = None
    """The expert whose it is: the ranks that hold this expert have it, and those that share each
    expert cut it. None where all ranks of the stage have it, or have parts of it."""
    second_name: str | None = None
    """Where the parameter is a copy, whose original is exported: the name under which checkpoints
    may hold the Hugging Face tensor once more."""

    @property
    def is_copy(self) -> bool:
        """Whether another mapping makes the same tensor."""
        return self.second_name is not None

    @property
    def axis(self) -> int:
        """The dimension along which pieces follow each other."""
        return self.dim or 0

    def whole(self, *, size: int, length: int) -> list[Piece]:
        """Return the pieces of the shards of all `size` ranks, each of `length` rows."""
        return [Piece(name, 0, shape[self.axis]) for name, shape in self.sources.items()]

    def pieces(self, *, rank: int, size: int, length: int) -> list[Piece]:
        """Return the pieces of a rank's shard.

        Args:
            rank: Of the tensor-parallel ranks.
            size: How many there are.
            length: Rows, or columns where those are cut, of each rank's shard.
        """
        if self.dim is None:
            rank, size = 0, 1
        whole = self.whole(size=size, length=length)
        assert total_length(whole) == size * length, (self.names[0], size, length)
        return cut(whole, rank * length, (rank + 1) * length)

    def shard_shape(self, size: int) -> Shape:
        """Return the shape of a rank's shard, without any padding."""
        shapes = list(self.sources.values())
        shard = list(shapes[0])
        rows = sum(shape[self.axis] for shape in shapes)
        shard[self.axis] = rows if self.dim is None else rows // size
        return tuple(shard)

    def fill(self, shard: torch.Tensor, read: ReadSlice, *, rank: int, size: int) -> None:
        """Write into a rank's `shard` what it is made of, in place."""
        offset = 0
        for piece in self.pieces(rank=rank, size=size, length=shard.shape[self.axis]):
            target = shard.narrow(self.axis, offset, piece.length)
            if piece.source is None:
                target.zero_()
            else:
                part = read(piece.source, dim=self.axis, start=piece.start, stop=piece.stop)
                target.copy_(part)
            offset += piece.length

    def spread(
        self, shard: torch.Tensor, into: Map[str, torch.Tensor], *, rank: int, size: int
    ) -> None:
        """Write what a rank's `shard` is made of into the whole tensors that are in `into`."""
        offset = 0
        for piece in self.pieces(rank=rank, size=size, length=shard.shape[self.axis]):
            if piece.source is not None and piece.source in into:
                target = into[piece.source].narrow(self.axis, piece.start, piece.length)
                target.copy_(shard.narrow(self.axis, offset, piece.length))
            offset += piece.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary(Mapping):
    """A row for each token, and zeros for the rows that complete the last shard.

    Zeros, as no token looks them up and the softmax leaves their logits out: they get no gradient,
    and nothing that training does to weights (decay, averages of moments) moves them.
    """

    dim: int | None = 0

    def whole(self, *, size: int, length: int) -> list[Piece]:
        """Return the tokens' rows and the padding."""
        ((name, shape),) = self.sources.items()
        padding = max(0, size * length - shape[0])
        return [Piece(name, 0, shape[0]), *([Piece(None, 0, padding)] if padding else [])]


@dataclass(frozen=True, kw_only=True, slots=True)
class Qkv(Mapping):
    """Queries, keys and values in one: of each group its queries, then its key and its value.

    `sources` are the projections of queries, keys and values, in this order; weights or biases.

    Example: 4 heads in 2 groups are `q0 q1 k0 v0 q2 q3 k1 v1`.
    """

    num_groups: int
    dim: int | None = 0

    def whole(self, *, size: int, length: int) -> list[Piece]:
        """Return the three pieces of each group."""
        rows = [(name, shape[0] // self.num_groups) for name, shape in self.sources.items()]
        return [
            Piece(name, group * num_rows, (group + 1) * num_rows)
            for group in range(self.num_groups)
            for name, num_rows in rows
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class GateUp(Mapping):
    """A gated unit's two projections in one: each rank has its part of both, the gate's first.

    `sources` are gate and up, in this order.
    """

    dim: int | None = 0

    def whole(self, *, size: int, length: int) -> list[Piece]:
        """Return two pieces for each rank."""
        half = length // 2
        return [
            Piece(name, rank * half, (rank + 1) * half)
            for rank in range(size)
            for name in self.sources
        ]
