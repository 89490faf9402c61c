"""The key-value cache of generation: one packed prefill, then one token per row and step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from rl_batched_data import PackedSequences

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(kw_only=True, slots=True)
class KeyValueCache:
    """Keys and values of this rank's layers, after rotary embeddings.

    The first forward is over packed prompts (prefill); each later one over one token per row, in
    the order of the rows, followed by padding tokens.
    """

    prompts: PackedSequences
    lengths: torch.Tensor
    """`[rows]` int64: tokens of each row, including those of the current forward."""
    layers: dict[int, Pair] = field(default_factory=dict)
    """By layer, `[rows, capacity, query_groups, head_size]` each."""

    def positions(self, num_tokens: int) -> torch.Tensor:
        """Return the position in its row of each token of a decoding step, `[num_tokens]` int64."""
        return F.pad(self.lengths - 1, (0, num_tokens - len(self.lengths)))

    def has(self, layer: int) -> bool:
        """Return whether a layer has cached the prompts."""
        return layer in self.layers

    def fill(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Cache the keys and values of the prompts, `[tokens, query_groups, head_size]`."""
        self.layers[layer] = (self.prompts.unpack(key[None]), self.prompts.unpack(value[None]))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
    ) -> torch.Tensor:
        """Append one token to each row; return its attention output, `[tokens, heads * head_size]`.

        Args:
            layer: Megatron-core's number of the layer.
            query: `[tokens, heads, head_size]`; the output of padding tokens beyond the rows is 0.
            key: `[tokens, query_groups, head_size]`.
            value: Like `key`.
            scale: Softmax scale; `head_size ** -0.5` when None.
        """
        num_rows = len(self.lengths)
        keys, values = self._add(layer, key[:num_rows], value[:num_rows])
        places = torch.arange(keys.shape[1], device=keys.device)
        output = F.scaled_dot_product_attention(
            query[:num_rows, :, None],
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=(places < self.lengths[:, None])[:, None, None],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return F.pad(output.flatten(1), (0, 0, 0, len(query) - num_rows))

    def _add(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        pair = self.layers[layer]
        if int(self.lengths.max()) > pair[0].shape[1]:
            # Grow by half, so that the copies stay linear in the number of generated tokens.
            room = max(16, pair[0].shape[1] // 2)
            pair = (F.pad(pair[0], (0, 0, 0, 0, 0, room)), F.pad(pair[1], (0, 0, 0, 0, 0, room)))
            self.layers[layer] = pair
        rows = torch.arange(len(self.lengths), device=key.device)
        for cached, new in zip(pair, (key, value), strict=True):
            cached[rows, self.lengths - 1] = new
        return pair
