"""Where the tokens of concatenated sequences lie: over the ranks that share them, and in attention.

With context parallelism every sequence is cut into twice as many chunks as there are ranks, and a
rank has one from the front and its counterpart from the back, so that causal attention costs all
ranks the same (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2). For attention
alone the tokens are laid out as rows, chunks of about one length together.
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
    """Chunks of about one length, at the same place in their sequences."""

    queries: torch.Tensor
    """`[rows, width]` int64: this rank's token at each place; any token where there is none."""
    keys: torch.Tensor
    """`[rows, key_width]` int64: what the queries may see, in the order of the gathered tokens."""
    mask: torch.Tensor | None
    """`[rows, 1, width, key_width]` bool: who sees whom. None: each row's last query sees its last
    key, and those before it one less each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """The tokens of a concatenation, on this rank and all of those that share its sequences."""

    own: torch.Tensor
    """`[total / ranks]` int64: this rank's tokens, in their order."""
    gathered: torch.Tensor
    """`[total]` int64: where each token lies once the ranks' tokens are laid end to end."""
    groups: list[RowGroup]
    places: torch.Tensor
    """`[total / ranks]` int64: where each own token lies in the groups' queries, end to end."""
    group: dist.ProcessGroup | None
    """The ranks that share the sequences; None where each has whole ones."""

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, *, group: dist.ProcessGroup | None) -> TokenLayout:
        """Return the layout of sequences that are padded to multiples of twice the ranks.

        Example, one sequence of 8 tokens over 2 ranks:
            rank 0: own = [0, 1, 6, 7], rank 1: own = [2, 3, 4, 5]

        Args:
            cu_seqlens: `[sequences + 1]`: where each sequence starts, and the total.
            group: The ranks that share each sequence; None or of one rank where none do.

        Raises:
            ValueError: A sequence cannot be cut.
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
        """Return this rank's part of per-token values `[total, ...]`."""
        return values if self.group is None else values.index_select(0, self.own)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the ranks' per-token values, laid end to end; the gradients are summed.

        Args:
            values: `[total / ranks, ...]`.
        """
        return gather_from_sequence_parallel_region(values.contiguous(), group=self.group)

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Return the ranks' per-token values in the order of the tokens, `[total, ...]`.

        Every rank is to use them in the same way: the gradient of its own part comes back.

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
    """What Megatron-core's layers are told of concatenated sequences, and where the tokens lie."""

    layout: TokenLayout | None = None
    cache: KeyValueCache | None = None
    """What attention is to remember, and to look up once it has; None where it does not."""

    @classmethod
    def of(
        cls, cu_seqlens: torch.Tensor, *, max_seqlen: int, group: dist.ProcessGroup | None
    ) -> PackedRows:
        """Return the parameters of a forward over these sequences.

        Args:
            cu_seqlens: `[sequences + 1]` int32: where each starts, padding included, and the total,
                over all ranks that share them.
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
    """Return the chunks of every sequence that `rank` has; whole sequences are one chunk.

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
    """Return this rank's chunks as rows, and the place of each own token in them."""
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
            # Rows of unlike length agree on who sees whom only from the front of their sequences.
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
