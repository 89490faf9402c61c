"""Indices of packed tokens: sharded over context-parallel ranks, and as rows for attention.

Under context parallelism every sequence is split into `2 * cp` chunks, and a rank holds one from
the front and its mirror image from the back, which balances the cost of causal attention
(Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2). For attention alone, chunks
of similar length are padded to rows of one width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from rl_batched_data.packing.packed_sequences import group_by_length

if TYPE_CHECKING:
    import torch.distributed as dist

    from rl_megatron_worker.attention.cache import KeyValueCache


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """Chunks of similar length, at the same position in their sequences."""

    queries: torch.Tensor
    """`[rows, width]` int64: index of the local token at each place; arbitrary at padding."""
    keys: torch.Tensor
    """`[rows, key_width]` int64: the keys of each row, as indices of the all-gathered tokens."""
    mask: torch.Tensor | None
    """`[rows, 1, width, key_width]` bool: the keys each query attends to. None: lower-right causal,
    the last query of a row attends to all its keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """Index maps between packed tokens, a rank's shard, and rows."""

    own: torch.Tensor
    """`[total / ranks]` int64: the packed tokens that this rank holds, in its order."""
    gathered: torch.Tensor
    """`[total]` int64: the index of each packed token in the all-gathered tokens."""
    groups: list[RowGroup]
    places: torch.Tensor
    """`[total / ranks]` int64: the index of each local token in the outputs of all groups."""
    group: dist.ProcessGroup | None
    """The context-parallel group; None without context parallelism."""

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, *, group: dist.ProcessGroup | None) -> TokenLayout:
        """Return the layout of sequences padded to multiples of `2 * cp` tokens.

        Example, one sequence of 8 tokens over 2 ranks:
            rank 0: own = [0, 1, 6, 7], rank 1: own = [2, 3, 4, 5]

        Args:
            cu_seqlens: `[sequences + 1]`: the start of each sequence, and the total.
            group: The context-parallel group; None or of one rank without context parallelism.

        Raises:
            ValueError: A sequence does not divide into the chunks.
        """
        num_ranks = 1 if group is None else group.size()
        rank = 0 if group is None else group.rank()
        edges: list[int] = cu_seqlens.tolist()
        num_chunks = len(chunks_of(0, num_ranks)) * num_ranks
        starts = torch.tensor(edges[:-1], dtype=torch.int64)
        lengths = torch.tensor(edges[1:], dtype=torch.int64) - starts
        if (lengths % num_chunks).any():
            raise ValueError(
                f"sequences of {lengths.tolist()} tokens, padding included, do not divide into "
                f"{num_chunks} chunks: policy.megatron_cfg.context_parallel_size={num_ranks}"
            )
        sizes = lengths // num_chunks
        parts = [_tokens_of(each, starts, sizes, num_ranks) for each in range(num_ranks)]
        gathered = torch.empty(edges[-1], dtype=torch.int64)
        gathered[torch.cat(parts)] = torch.arange(edges[-1])
        groups, places = _rows(starts, sizes, chunks_of(rank, num_ranks), gathered)
        device = cu_seqlens.device
        return cls(
            own=parts[rank].to(device),
            gathered=gathered.to(device),
            groups=[_moved(each, device) for each in groups],
            places=places.to(device),
            group=group if num_ranks > 1 else None,
        )

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of per-token values `[total, ...]`."""
        return values if self.group is None else values.index_select(0, self.own)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """All-gather per-token values in rank order; backward is a reduce-scatter.

        Args:
            values: `[total / ranks, ...]`.
        """
        return gather_from_sequence_parallel_region(values.contiguous(), group=self.group)

    def gather_in_order(self, values: torch.Tensor) -> torch.Tensor:
        """All-gather per-token values in the order of the packed tokens, `[total, ...]`.

        Every rank has to use them in the same way: the backward pass takes the local slice of the
        gradient, without a reduction.

        Args:
            values: `[total / ranks, ...]`.
        """
        if self.group is None:
            return values
        joined = gather_from_sequence_parallel_region(
            values.contiguous(), tensor_parallel_output_grad=False, group=self.group
        )
        return joined.index_select(0, self.gathered)


@dataclass
class PackedRows(PackedSeqParams):
    """`PackedSeqParams` for Megatron-core's layers, with the token layout and the cache."""

    layout: TokenLayout | None = None
    cache: KeyValueCache | None = None
    """Filled by the prefill and read by the steps after it; None outside of generation."""

    @classmethod
    def of(
        cls, cu_seqlens: torch.Tensor, *, max_seqlen: int, group: dist.ProcessGroup | None
    ) -> PackedRows:
        """Return the parameters of a forward over these sequences.

        Args:
            cu_seqlens: `[sequences + 1]` int32: the start of each sequence, padding included, and
                the total, over all context-parallel ranks.
            max_seqlen: The longest sequence, padding included.
            group: See `TokenLayout.of`.
        """
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            layout=TokenLayout.of(cu_seqlens, group=group),
        )


def chunks_of(rank: int, num_ranks: int) -> tuple[int, ...]:
    """Return the indices of each sequence's chunks on `rank`; (0,) for one rank.

    Example: rank 1 of 4 -> (1, 6)
    """
    return (0,) if num_ranks == 1 else (rank, 2 * num_ranks - 1 - rank)


def _tokens_of(
    rank: int, starts: torch.Tensor, sizes: torch.Tensor, num_ranks: int
) -> torch.Tensor:
    parts = [torch.arange(0)]
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        for chunk in chunks_of(rank, num_ranks):
            parts.append(torch.arange(start + chunk * size, start + (chunk + 1) * size))
    return torch.cat(parts)


def _rows(
    starts: torch.Tensor, sizes: torch.Tensor, chunks: tuple[int, ...], gathered: torch.Tensor
) -> tuple[list[RowGroup], torch.Tensor]:
    """Return this rank's chunks as rows, and the index of each local token in them."""
    own_starts = len(chunks) * (sizes.cumsum(0) - sizes)
    places = torch.empty(len(chunks) * int(sizes.sum()), dtype=torch.int64)
    groups: list[RowGroup] = []
    base = 0
    for rows in group_by_length(sizes.tolist()):
        widths, offsets = sizes[rows, None], torch.arange(int(sizes[rows].max()))
        is_token = offsets < widths
        place = torch.arange(is_token.numel()).view(is_token.shape)
        for position, chunk in enumerate(chunks):
            queries = own_starts[rows, None] + position * widths + offsets
            places[queries[is_token]] = base + place[is_token]
            base += is_token.numel()
            key_offsets = torch.arange((chunk + 1) * len(offsets))
            keys = (starts[rows, None] + key_offsets).clamp(max=len(gathered) - 1)
            # In a later chunk, padding shifts the lower-right diagonal of shorter rows: mask them.
            is_plain = chunk == 0 or bool(is_token.all())
            seen = (chunk * widths + offsets)[:, None, :, None] >= key_offsets
            groups.append(
                RowGroup(
                    queries=queries.clamp(max=len(places) - 1),
                    keys=gathered[keys],
                    mask=None if is_plain else seen,
                )
            )
    return groups, places


def _moved(group: RowGroup, device: torch.device) -> RowGroup:
    mask = None if group.mask is None else group.mask.to(device)
    return RowGroup(queries=group.queries.to(device), keys=group.keys.to(device), mask=mask)
