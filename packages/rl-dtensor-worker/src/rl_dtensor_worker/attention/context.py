"""Attention over sequences that are sharded among context-parallel ranks.

`rl_batched_data.packing.context_shards` says which chunks of each sequence a rank has. Keys and
values are all-gathered; queries stay. The kernel is torch's scaled-dot-product attention on every
device, and packed sequences and sliding windows are honoured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from rl_batched_data.packing.context_shards import ContextShards
from torch.nn.attention.bias import causal_lower_right

from rl_dtensor_worker.attention.packed import gather_rows
from rl_dtensor_worker.parallel.tensor import collectives

if TYPE_CHECKING:
    import torch.distributed as dist
    from rl_batched_data import PackedSequences
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextRows:
    """This rank's chunks of packed sequences: an `AttentionLayout`."""

    group: dist.ProcessGroup
    """The ranks that shard the sequences."""
    shards: ContextShards

    @classmethod
    def of(cls, packed: PackedSequences, group: dist.ProcessGroup) -> ContextRows:
        """Return this rank's chunks of sequences that are padded to multiples of twice the ranks.

        Raises:
            ValueError: A sequence is padded otherwise.
        """
        shards = ContextShards.of(packed.cu_seqlens, rank=group.rank(), num_ranks=group.size())
        return cls(group=group, shards=shards)

    def shard(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[1, total / ranks, ...]`: this rank's shard of per-token `[1, total, ...]`."""
        return values.index_select(1, self.shards.own)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[1, total, ...]` in the order of the tokens, from `[1, total / ranks, ...]`.

        Every rank must go on to compute the same from it: the gradient is not summed.
        """
        gathered = collectives.gather_for_replicated_use(values, self.group, 1)
        return gathered.index_select(1, self.shards.gathered)

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
        # Keys and values in one collective. Each rank has queries of its own, so that their
        # gradients are partial and the backward pass reduce-scatters them.
        gathered = collectives.gather_for_sharded_use(
            torch.cat([key, value], dim=-1), self.group, 2
        )
        keys, values = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
        outputs: list[torch.Tensor] = []
        for chunk in self.shards.chunks:
            mask = chunk.mask(sliding_window)
            if mask is None:
                # Aligned to the last key: a later chunk's first query sees the chunks before it.
                mask = causal_lower_right(chunk.queries.shape[1], chunk.keys.shape[1])
            output = F.scaled_dot_product_attention(
                gather_rows(query, chunk.queries),
                gather_rows(keys, chunk.keys),
                gather_rows(values, chunk.keys),
                attn_mask=mask,
                dropout_p=kwargs.get("dropout", 0.0),
                scale=kwargs.get("scaling"),
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.shards.places)[None]
