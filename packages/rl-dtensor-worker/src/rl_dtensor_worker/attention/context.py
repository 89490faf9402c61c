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
from rl_batched_data.packing.packed_sequences import group_by_length
from torch.nn.attention.bias import causal_lower_right

from rl_dtensor_worker.attention.packed import rows_of
from rl_dtensor_worker.parallel.tensor import collectives

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

    def to(self, device: torch.device) -> Chunks:
        """Return the same on `device`."""
        return Chunks(
            queries=self.queries.to(device),
            keys=self.keys.to(device),
            query_positions=self.query_positions.to(device),
            equal=self.equal,
        )

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
        cut = _Cut.of(packed, num_ranks=group.size())
        parts = [cut.own_tokens(rank) for rank in range(group.size())]
        order = torch.cat(parts)
        gathered = torch.empty_like(order)
        gathered[order] = torch.arange(len(order))
        chunks, are_tokens = zip(
            *(
                cut.chunks(rows, half, rank=group.rank(), gathered=gathered)
                for rows in group_by_length(cut.sizes.tolist())
                for half in (0, 1)
            ),
            strict=True,
        )
        queries = torch.cat([chunk.queries.flatten() for chunk in chunks])
        is_token = torch.cat([each.flatten() for each in are_tokens])
        places = torch.empty(len(parts[0]), dtype=torch.int64)
        places[queries[is_token]] = torch.arange(len(queries))[is_token]
        device = packed.cu_seqlens.device
        return cls(
            group=group,
            own=parts[group.rank()].to(device),
            gathered=gathered.to(device),
            chunks=[chunk.to(device) for chunk in chunks],
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """How sequences that lie end to end are cut into twice as many chunks as there are ranks."""

    starts: torch.Tensor
    """`[sequences]` int64: each one's first token."""
    sizes: torch.Tensor
    """`[sequences]` int64: the tokens of each of its chunks."""
    num_ranks: int

    @classmethod
    def of(cls, packed: PackedSequences, *, num_ranks: int) -> _Cut:
        """Return it, on the CPU."""
        edges = packed.cu_seqlens.cpu().long()
        return cls(starts=edges[:-1], sizes=edges.diff() // (2 * num_ranks), num_ranks=num_ranks)

    def numbers(self, rank: int) -> tuple[int, int]:
        """Return which chunks of a sequence a rank has: from the front, and from the back."""
        return rank, 2 * self.num_ranks - 1 - rank

    def own_tokens(self, rank: int) -> torch.Tensor:
        """Return the tokens of `rank`, in its order: of each sequence, both chunks."""
        return torch.cat(
            [
                torch.arange(start + number * size, start + (number + 1) * size)
                for start, size in zip(self.starts.tolist(), self.sizes.tolist(), strict=True)
                for number in self.numbers(rank)
            ]
        )

    def chunks(
        self, rows: list[int], half: int, *, rank: int, gathered: torch.Tensor
    ) -> tuple[Chunks, torch.Tensor]:
        """Return the first or second chunk that `rank` has of some sequences, beside each other.

        With it comes which places have a token: `[rows, width]` bool.
        """
        size, start = self.sizes[rows, None], self.starts[rows, None]
        number, offsets = self.numbers(rank)[half], torch.arange(int(size.max()))
        own_start = 2 * (self.sizes.cumsum(0) - self.sizes)[rows, None]
        queries = own_start + half * size + offsets
        keys = start + torch.arange((number + 1) * len(offsets))
        is_token = offsets < size
        chunks = Chunks(
            queries=queries.clamp(max=2 * int(self.sizes.sum()) - 1),
            keys=gathered[keys.clamp(max=len(gathered) - 1)],
            query_positions=number * size + offsets,
            equal=bool(is_token.all()),
        )
        return chunks, is_token
