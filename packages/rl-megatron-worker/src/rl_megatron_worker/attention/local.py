"""Causal attention over packed sequences for Megatron-core's layers, on every device.

Megatron-core's own attention supports neither packed sequences nor context parallelism, and
Transformer Engine's needs a GPU. This one groups sequences of similar length into padded rows and
calls torch's scaled-dot-product attention. Under context parallelism queries stay local; keys and
values are all-gathered.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.bias import causal_lower_right

from rl_megatron_worker.attention.packed import PackedRows

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from rl_megatron_worker.attention.packed import RowGroup


class PackedAttention(MegatronModule):
    """The `core_attention` of a layer: no parameters, and `PackedRows` at every call.

    Args:
        config: Megatron-core's config of the model.
        layer_number: Counts from 1, over all pipeline stages.
        attn_mask_type: Ignored: attention is causal.
        attention_type: Must be `self`.
        cp_comm_type: Ignored: keys and values are all-gathered.
        softmax_scale: `head_size ** -0.5` when None.
        pg_collection: Ignored: `PackedRows` holds the context-parallel group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        assert attention_type == "self", attention_type
        assert config.window_size is None, "no sliding windows"
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: object,
    ) -> torch.Tensor:
        """Return the attention output of each token, `[tokens, heads * head_size]`.

        Args:
            query: `[tokens, heads, head_size]`, local tokens.
            key: `[tokens, query_groups, head_size]`, local tokens.
            value: Like `key`.
            attention_mask: Ignored: attention is causal within each sequence.
            packed_seq_params: `PackedRows`.
            unused: Arguments of other `core_attention` modules.
        """
        assert isinstance(packed_seq_params, PackedRows), type(packed_seq_params)
        layout, cache = packed_seq_params.layout, packed_seq_params.cache
        assert layout is not None
        if cache is not None and cache.has(self.layer_number):
            return cache.attend(self.layer_number, query, key, value, scale=self.softmax_scale)
        if cache is not None:
            cache.fill(self.layer_number, key, value)
        if layout.group is not None:
            # One collective for both; their gradients are reduce-scattered in the backward pass.
            both = layout.gather(torch.cat([key, value], dim=-1))
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        outputs = [self._attend(group, query, key, value) for group in layout.groups]
        return torch.cat(outputs).index_select(0, layout.places)

    def _attend(
        self, group: RowGroup, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs of a group's rows, flattened to `[rows * width, heads * size]`."""
        width, key_width = group.queries.shape[1], group.keys.shape[1]
        # Flash kernels take `is_causal` alone; a bias object or a mask selects slower ones.
        is_square = group.mask is None and width == key_width
        mask = group.mask
        if mask is None and not is_square:
            mask = causal_lower_right(width, key_width)
        rows_query = query[group.queries].transpose(1, 2)
        rows_key, rows_value = (each[group.keys].transpose(1, 2) for each in (key, value))
        dropout = self.config.attention_dropout if self.training else 0.0
        with _tensor_parallel_rng() if dropout else nullcontext():
            output = F.scaled_dot_product_attention(
                rows_query,
                rows_key,
                rows_value,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=is_square,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return output.transpose(1, 2).flatten(2).flatten(0, 1)


def _tensor_parallel_rng() -> AbstractContextManager[None]:
    """Return the scope of the RNG state that differs between tensor-parallel ranks (dropout)."""
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    return tracker.fork()
