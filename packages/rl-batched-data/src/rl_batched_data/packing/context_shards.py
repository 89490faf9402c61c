"""Token indices of packed sequences that are sharded over context-parallel ranks.

Every sequence is split into `2 * num_ranks` chunks, and rank `r` owns chunks `r` and
`2 * num_ranks - 1 - r` ("zig-zag"), which balances the cost of causal attention (Grattafiori et al.
2024, "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2). Queries stay on their rank;
keys and values are all-gathered.
"""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch

from rl_batched_data.columns import to_device
from rl_batched_data.packing.packed_sequences import group_by_length

# The largest mask, 4 MiB as bool: on two ranks that of two sequences of 2,896 tokens.
MASK_ELEMENTS = 2**22


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContextChunks:
    """One chunk each of sequences of similar length, as padded rows for batched attention."""

    queries: torch.Tensor
    """`[rows, width]` int64: index of each query in the rank's tokens; arbitrary in padding."""
    keys: torch.Tensor
    """`[rows, key_width]` int64: index of each visible key in the gathered tokens."""
    query_positions: torch.Tensor
    """`[rows, width]` int64: each query's position in its sequence."""
    is_causal: bool
    """Whether each row's last query is at its last key, so that causal attention aligned to the
    lower right needs no mask."""

    def to(self, device: torch.device) -> ContextChunks:
        """Return the same on `device`."""
        return ContextChunks(
            queries=to_device(self.queries, device),
            keys=to_device(self.keys, device),
            query_positions=to_device(self.query_positions, device),
            is_causal=self.is_causal,
        )

    def mask(self, sliding_window: int | None = None) -> torch.Tensor | None:
        """Return which keys each query sees, `[rows, 1, width, key_width]` bool.

        Args:
            sliding_window: Number of keys that a query sees, itself included; all when None.

        Returns:
            None if causal attention without a mask is right, see `is_causal`.
        """
        key_width = self.keys.shape[1]
        windowed = sliding_window is not None and sliding_window < key_width
        if self.is_causal and not windowed:
            return None
        positions = self.query_positions[:, None, :, None]
        distance = positions - torch.arange(key_width, device=positions.device)
        seen = distance >= 0
        return seen & (distance < sliding_window) if sliding_window is not None else seen


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContextShards:
    """The tokens of packed sequences that one rank owns, and the keys that they attend to.

    Example, one sequence of 8 tokens over 2 ranks:
        rank 0: own = [0, 1, 6, 7], rank 1: own = [2, 3, 4, 5]
        gathered = [0, 1, 4, 5, 6, 7, 2, 3] on both
    """

    own: torch.Tensor
    """`[total / ranks]` int64: indices of this rank's tokens, ascending."""
    gathered: torch.Tensor
    """`[total]` int64: index of each token in the all-gathered tokens."""
    chunks: list[ContextChunks]
    places: torch.Tensor
    """`[total / ranks]` int64: index of each owned token in the flattened queries of all chunks."""

    @classmethod
    def of(
        cls,
        cu_seqlens: torch.Tensor,
        *,
        rank: int,
        num_ranks: int,
        device: torch.device | None = None,
    ) -> ContextShards:
        """Return the shards of `rank`.

        Args:
            cu_seqlens: `[sequences + 1]`, any integers: cumulative lengths, padding included. On
                the CPU nothing waits for a device.
            rank: Rank in the context-parallel group.
            num_ranks: Size of the group. With 1, every sequence is one chunk.
            device: Where the shards are; None: on the device of `cu_seqlens`.

        Raises:
            ValueError: A length, padding included, is not a multiple of the number of chunks.
        """
        split = _Split.of(cu_seqlens, num_ranks=num_ranks)
        owned = [split.tokens(each) for each in range(num_ranks)]
        # The all-gather concatenates the ranks' tokens: `gathered` inverts that permutation.
        order = torch.cat(owned)
        gathered = torch.empty_like(order)
        gathered[order] = torch.arange(len(order))
        chunks: list[ContextChunks] = []
        places = torch.empty(len(owned[rank]), dtype=torch.int64)
        base = 0
        sizes = _integers(split.sizes)
        for rows in _groups(sizes, num_chunks=len(split.chunks_of(rank)) * num_ranks):
            for position in range(len(split.chunks_of(rank))):
                chunk, is_token = split.rows(rows, position, rank=rank, gathered=gathered)
                flat = base + torch.arange(is_token.numel()).view(is_token.shape)
                places[chunk.queries[is_token]] = flat[is_token]
                base += is_token.numel()
                chunks.append(chunk)
        device = device or cu_seqlens.device
        return cls(
            own=to_device(owned[rank], device),
            gathered=to_device(gathered, device),
            chunks=[chunk.to(device) for chunk in chunks],
            places=to_device(places, device),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Split:
    """Sequences split into equal chunks; tensors are on the CPU."""

    starts: torch.Tensor
    """`[sequences]` int64: index of each sequence's first token."""
    sizes: torch.Tensor
    """`[sequences]` int64: tokens per chunk."""
    num_ranks: int

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, *, num_ranks: int) -> _Split:
        edges = cu_seqlens.cpu().long()
        lengths = edges.diff()
        num_chunks = 1 if num_ranks == 1 else 2 * num_ranks
        if bool((lengths % num_chunks).any()):
            found = _integers(lengths)
            raise ValueError(
                f"sequences of {found} tokens, padding included, do not divide into "
                f"{num_chunks} chunks for context_parallel_size={num_ranks}"
            )
        return cls(starts=edges[:-1], sizes=lengths // num_chunks, num_ranks=num_ranks)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Return the chunks of a sequence that `rank` owns. Example: rank 1 of 4 -> (1, 6)."""
        return (0,) if self.num_ranks == 1 else (rank, 2 * self.num_ranks - 1 - rank)

    def tokens(self, rank: int) -> torch.Tensor:
        """Return the indices of the tokens of `rank`, sequence after sequence."""
        parts = [torch.arange(0)]
        starts = _integers(self.starts)
        sizes = _integers(self.sizes)
        for start, size in zip(starts, sizes, strict=True):
            for chunk in self.chunks_of(rank):
                parts.append(torch.arange(start + chunk * size, start + (chunk + 1) * size))
        return torch.cat(parts)

    def rows(
        self, rows: list[int], position: int, *, rank: int, gathered: torch.Tensor
    ) -> tuple[ContextChunks, torch.Tensor]:
        """Return one chunk each of sequences of similar length.

        Args:
            rows: Indices of the sequences.
            position: 0 for the chunk from the front, 1 for the one from the back.
            rank: Rank in the context-parallel group.
            gathered: See `ContextShards.gathered`.

        Returns:
            The chunks, and a mask of the queries that are no padding, `[rows, width]` bool.
        """
        size, start = self.sizes[rows, None], self.starts[rows, None]
        numbers = self.chunks_of(rank)
        number, offsets = numbers[position], torch.arange(int(size.max()))
        own_start = len(numbers) * (self.sizes.cumsum(0) - self.sizes)[rows, None]
        num_own = len(numbers) * int(self.sizes.sum())
        queries = own_start + position * size + offsets
        keys = start + torch.arange((number + 1) * len(offsets))
        is_token = offsets < size
        chunks = ContextChunks(
            queries=queries.clamp(max=num_own - 1),
            keys=gathered[keys.clamp(max=len(gathered) - 1)],
            query_positions=number * size + offsets,
            # In later chunks, lower-right alignment would give shorter rows keys past their end.
            is_causal=number == 0 or bool(is_token.all()),
        )
        return chunks, is_token


def _groups(sizes: list[int], *, num_chunks: int) -> list[list[int]]:
    """Return groups of sequences that are attended to together, longest first.

    Chunks of different sizes need a mask over all pairs, which few kernels take and which grows
    with the square of the length: long sequences are only grouped with others of their size.

    Args:
        sizes: Tokens per chunk of each sequence.
        num_chunks: Chunks per sequence.
    """
    groups: list[list[int]] = []
    for rows in group_by_length(sizes):
        largest = sizes[rows[0]]
        if len(rows) * largest * largest * num_chunks <= MASK_ELEMENTS:
            groups.append(rows)
            continue
        for _, same in groupby(rows, key=sizes.__getitem__):
            groups.append([*same])
    return groups


def _integers(tensor: torch.Tensor) -> list[int]:
    return cast(list[int], tensor.tolist())
