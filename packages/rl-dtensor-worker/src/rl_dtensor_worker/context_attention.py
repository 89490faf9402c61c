"""Attention of sequences that are cut over ranks.

Every sequence is cut into twice as many chunks as there are ranks, and a rank has one from the
front and its counterpart from the back, so that causal attention costs all ranks the same
(Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2). Keys and values are
gathered; queries stay. It is torch's scaled-dot-product attention on every device, works on packed
sequences, and honours sliding windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from rl_dtensor_worker import collectives
from rl_dtensor_worker.packed_attention import group_by_length, rows_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from rl_batched_data import PackedSequences
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """Chunks of sequences of about one length, at the same place in each."""

    queries: torch.Tensor
    """`[rows, width]` int64: this rank's token at each place; any token where there is none."""
    keys: torch.Tensor
    """`[rows, key_width]` int64: what the queries may see, among the gathered tokens."""
    query_positions: torch.Tensor
    """`[rows, width]` int64: each query's place in its sequence."""
    equal: bool
    """Whether all rows are of one length, so that each sees the last `width` keys causally."""

    def mask(self, sliding_window: int | None) -> torch.Tensor | None:
        """Return who sees whom, `[rows, 1, width, key_width]`; None where that is plain causal."""
        key_width = self.keys.shape[1]
        windowed = sliding_window is not None and sliding_window < key_width
        if self.equal and not windowed:
            return None
        positions = self.query_positions[:, None, :, None]
        distance = positions - torch.arange(key_width, device=positions.device)
        seen = distance >= 0
        return seen & (distance < sliding_window) if sliding_window is not None else seen


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextRows:
    """How this rank's chunks see the tokens of all ranks: an `AttentionLayout`."""

    group: dist.ProcessGroup
    """The ranks that share the sequences."""
    own: torch.Tensor
    """`[total / ranks]` int64: this rank's tokens, in their order, among all."""
    gathered: torch.Tensor
    """`[total]` int64: where each token lies once the ranks' tokens are laid end to end."""
    chunks: list[Chunks]
    places: torch.Tensor
    """`[total / ranks]` int64: where each own token lies in the queries, laid end to end."""

    @classmethod
    def of(cls, packed: PackedSequences, group: dist.ProcessGroup) -> ContextRows:
        """Return this rank's chunks of sequences that are padded to multiples of twice the ranks.

        Example, one sequence of 8 tokens over 2 ranks:
            rank 0: own = [0, 1, 6, 7], rank 1: own = [2, 3, 4, 5]
        """
        edges: list[int] = packed.cu_seqlens.tolist()
        starts = torch.tensor(edges[:-1])
        sizes = (torch.tensor(edges[1:]) - starts) // (2 * group.size())
        parts = [_own_tokens(starts, sizes, rank, group.size()) for rank in range(group.size())]
        gathered = torch.empty(edges[-1], dtype=torch.int64)
        gathered[torch.cat(parts)] = torch.arange(edges[-1])
        chunks: list[Chunks] = []
        places = torch.empty(len(parts[0]), dtype=torch.int64)
        base, device = 0, packed.cu_seqlens.device
        own_starts = 2 * (sizes.cumsum(0) - sizes)
        for rows in group_by_length(sizes.tolist()):
            for half, chunk in enumerate((group.rank(), 2 * group.size() - 1 - group.rank())):
                width = int(sizes[rows].max())
                offsets = torch.arange(width)
                is_token = offsets < sizes[rows, None]
                queries = own_starts[rows, None] + half * sizes[rows, None] + offsets
                places[queries[is_token]] = (base + torch.arange(is_token.numel())).view(
                    is_token.shape
                )[is_token]
                base += is_token.numel()
                keys = starts[rows, None] + torch.arange((chunk + 1) * width)
                chunks.append(
                    Chunks(
                        queries=queries.clamp(max=len(places) - 1).to(device),
                        keys=gathered[keys.clamp(max=edges[-1] - 1)].to(device),
                        query_positions=(chunk * sizes[rows, None] + offsets).to(device),
                        equal=bool(is_token.all()),
                    )
                )
        return cls(
            group=group,
            own=parts[group.rank()].to(device),
            gathered=gathered.to(device),
            chunks=chunks,
            places=places.to(device),
        )

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of per-token values `[1, total, ...]`."""
        return values.index_select(1, self.own)

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Return the ranks' per-token values in the tokens' order, `[1, total, ...]`.

        Every rank is to use them in the same way: the gradient of its own part comes back.
        """
        return collectives.gather_alike(values, self.group, 1).index_select(1, self.gathered)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sliding_window: int | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """See `AttentionLayout.attend`."""
        joined = collectives.gather_parts(torch.cat([key, value], dim=-1), self.group, 2)
        keys, values = joined.split([key.shape[-1], value.shape[-1]], dim=-1)
        outputs: list[torch.Tensor] = []
        for chunk in self.chunks:
            rows_query = rows_of(query, chunk.queries)
            mask = chunk.mask(sliding_window)
            if mask is None:
                mask = causal_lower_right(chunk.queries.shape[1], chunk.keys.shape[1])
            output = F.scaled_dot_product_attention(
                rows_query,
                rows_of(keys, chunk.keys),
                rows_of(values, chunk.keys),
                attn_mask=mask,
                dropout_p=kwargs.get("dropout", 0.0),
                scale=kwargs.get("scaling"),
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.places)[None]


def _own_tokens(
    starts: torch.Tensor, sizes: torch.Tensor, rank: int, num_ranks: int
) -> torch.Tensor:
    """Return the tokens of `rank`: of each sequence its chunk from the front, and from the back."""
    parts: list[torch.Tensor] = []
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        for chunk in (rank, 2 * num_ranks - 1 - rank):
            parts.append(torch.arange(start + chunk * size, start + (chunk + 1) * size))
    return torch.cat(parts)
