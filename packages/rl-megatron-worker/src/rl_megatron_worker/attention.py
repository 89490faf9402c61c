"""Causal attention over packed sequences for Megatron-core's layers, on every device.

Megatron-core's own attention supports neither packed sequences nor context parallelism, and
Transformer Engine's needs a GPU. This one takes torch's flash kernel for packed sequences where it
runs, and else groups sequences of similar length into padded rows for torch's scaled-dot-product
attention. Under context parallelism queries stay local; keys and
values are all-gathered. In generation a key-value cache takes their place: one packed prefill, then
one token per row and step.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from rl_interfaces.backend.attention import (
    attend,
    attend_to_cache,
    attend_to_packed,
    takes_packed,
)
from torch import nn

from rl_megatron_worker.layout import PackedRows

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from rl_batched_data import PackedSequences

    from rl_megatron_worker.model.config import DecoderConfig

Pair = tuple[torch.Tensor, torch.Tensor]


class PackedAttention(MegatronModule):
    """The `core_attention` of a layer, with `PackedRows` at every call.

    Its one parameter is `softmax_offset`, `[heads / tp]`: the sinks of heads that have them.

    Args:
        config: Megatron-core's config of the model, with the windows of its layers.
        layer_number: Counts from 1, over all pipeline stages.
        attn_mask_type: Ignored: attention is causal.
        attention_type: Must be `self`.
        cp_comm_type: Ignored: keys and values are all-gathered.
        softmax_scale: `head_size ** -0.5` when None.
        pg_collection: Ignored: `PackedRows` holds the context-parallel group.
        sizes: Ignored: keys and values tell the sizes of their heads.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **sizes: object,
    ) -> None:
        super().__init__(config)
        assert attention_type == "self", attention_type
        self.layer_number = layer_number
        self.sliding_window = window_of(config, layer_number)
        self.soft_cap = config.attention_soft_cap
        self.softmax_scale = softmax_scale
        self.softmax_offset = _sinks(config) if config.softmax_type == "learnable" else None
        has_own_base = config.window_rotary_base is not None and self.sliding_window is not None
        if config.rotary_scale != 1.0 and not has_own_base:
            # One factor on queries and on keys that are rotated in full is two on their products.
            assert config.kv_channels is not None
            own = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
            self.softmax_scale = own * config.rotary_scale**2

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
        rows, cache = packed_seq_params, packed_seq_params.cache
        # The prefill attends as in training; from the second forward on a layer has its keys.
        if cache is not None and cache.has(self.layer_number):
            return cache.attend(
                self.layer_number,
                query,
                key,
                value,
                scale=self.softmax_scale,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                sinks=self.softmax_offset,
            )
        if cache is not None:
            cache.fill(self.layer_number, key, value)
        if rows.context_group is not None:
            # One all-gather for both, and one reduce-scatter of both gradients.
            both = rows.gather_for_attention(torch.cat([key, value], dim=-1))
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        # Heads are sharded over tensor-parallel ranks: each needs random numbers of its own.
        dropout = self.config.attention_dropout if self.training else 0.0
        is_plain = rows.context_group is None and not dropout and self.soft_cap is None
        is_plain = is_plain and self.softmax_offset is None
        if is_plain and takes_packed(query, value):
            return attend_to_packed(
                query,
                key,
                value,
                rows.cu_seqlens,
                max_seqlen=rows.max_seqlen_q,
                sliding_window=self.sliding_window,
                scale=self.softmax_scale,
            ).flatten(1)
        with _tensor_parallel_rng() if dropout else nullcontext():
            return self._attend_to_rows(rows, query, key, value, dropout=dropout)

    def _attend_to_rows(
        self,
        rows: PackedRows,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        dropout: float,
    ) -> torch.Tensor:
        """Return the output of each query, `[tokens, heads * head_size]`, a group at a time."""
        chunks = rows.masked_chunks(self.sliding_window)
        gathered = zip(
            rows.queries.gather(query), rows.keys.gather(key), rows.keys.gather(value), strict=True
        )
        outputs: list[torch.Tensor] = []
        for (_, mask), group in zip(chunks, gathered, strict=True):
            rows_query, rows_key, rows_value = (each.transpose(1, 2) for each in group)
            # Without a mask it is aligned to the last key: a later chunk's first query sees the
            # chunks before it.
            options = {"dropout": dropout, "scale": self.softmax_scale}
            if self.soft_cap is None:
                sinks = self.softmax_offset
                output = attend(rows_query, rows_key, rows_value, mask, sinks=sinks, **options)
            else:
                output = _attend_capped(
                    rows_query, rows_key, rows_value, mask, soft_cap=self.soft_cap, **options
                )
            outputs.append(output.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, rows.shards.places)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the sinks for a checkpoint, sharded by heads."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group()),
            dp_cp_group=metadata["dp_cp_group"],
        )


def _sinks(config: DecoderConfig) -> nn.Parameter:
    """Return the sinks of this rank's heads, uninitialised."""
    num_heads = config.num_attention_heads // config.tensor_model_parallel_size
    device = torch.cuda.current_device()
    sinks = nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype, device=device))
    set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    return sinks


@dataclass(kw_only=True, slots=True)
class KeyValueCache:
    """Keys and values of this rank's layers, after rotary embeddings.

    The first forward is over packed prompts (prefill); each later one over one token per row, in
    the order of the rows, followed by padding tokens.
    """

    prompts: PackedSequences
    lengths: torch.Tensor
    """`[rows]` int64: tokens of each row, including those of the current forward."""
    longest: int
    """The largest of `lengths`, on the host: layers read it at every step."""
    layers: dict[int, Pair] = field(default_factory=dict)
    """By layer, `[rows, capacity, query_groups, head_size]` each. Linear attention keeps the last
    inputs of its convolution, and its state."""

    def positions(self, num_tokens: int) -> torch.Tensor:
        """Return the position in its row of each token of a decoding step, `[num_tokens]` int64."""
        return F.pad(self.lengths - 1, (0, num_tokens - len(self.lengths)))

    def has(self, layer: int) -> bool:
        """Return whether a layer has cached the prompts."""
        return layer in self.layers

    def fill(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Cache the keys and values of the prompts, `[tokens, query_groups, head_size]`."""
        self.layers[layer] = (self.prompts.unpack(key[None]), self.prompts.unpack(value[None]))

    def select(self, rows: torch.Tensor) -> None:
        """Have the keys and values of these rows, `[selected]` int64, repeated or left out."""
        self.layers = {
            layer: (key[rows], value[rows]) for layer, (key, value) in self.layers.items()
        }

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Append one token to each row; return its attention output, `[tokens, heads * head_size]`.

        Args:
            layer: Megatron-core's number of the layer.
            query: `[tokens, heads, head_size]`; the output of padding tokens beyond the rows is 0.
            key: `[tokens, query_groups, head_size]`.
            value: Like `key`.
            scale: Softmax scale; `head_size ** -0.5` when None.
            sliding_window: How many tokens the new one sees, itself included; all when None.
            soft_cap: Bound on the scores; none when None.
            sinks: `[heads]`, see `attend`; none when None.
        """
        # Tokens beyond the rows complete the total that sequence parallelism has to divide.
        num_rows = len(self.lengths)
        keys, values = self._add(layer, key[:num_rows], value[:num_rows])
        places = torch.arange(keys.shape[1], device=keys.device)
        # One query per row sees all tokens so far: the mask hides unused capacity alone.
        seen = places < self.lengths[:, None]
        if sliding_window is not None:
            seen &= places >= self.lengths[:, None] - sliding_window
        query_of_rows, keys, values = query[:num_rows], keys.transpose(1, 2), values.transpose(1, 2)
        one, mask = query_of_rows[:, :, None], seen[:, None, None]
        if sinks is not None:
            output = attend(one, keys, values, mask, scale=scale, sinks=sinks)
        elif soft_cap is None:
            output = attend_to_cache(query_of_rows, keys, values, seen, scale=scale)
        else:
            output = _attend_capped(one, keys, values, mask, soft_cap=soft_cap, scale=scale)
        return F.pad(output.flatten(1), (0, 0, 0, len(query) - num_rows))

    def _add(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        pair = self.layers[layer]
        if self.longest > pair[0].shape[1]:
            # Grow by half, so that the copies stay linear in the number of generated tokens.
            room = max(16, pair[0].shape[1] // 2)
            pair = (F.pad(pair[0], (0, 0, 0, 0, 0, room)), F.pad(pair[1], (0, 0, 0, 0, 0, room)))
            self.layers[layer] = pair
        rows = torch.arange(len(self.lengths), device=key.device)
        for cached, new in zip(pair, (key, value), strict=True):
            cached[rows, self.lengths - 1] = new
        return pair


def _attend_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    soft_cap: float,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Return attention with scores that are bounded by `soft_cap`, as `attend` does without.

    No kernel of torch bounds them: the scores are materialised, `[rows, heads, queries, keys]`.
    """
    shared = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    scores = (soft_cap * torch.tanh(scores / soft_cap)).float()
    if mask is None:
        # Aligned to the last key.
        num_queries, num_keys = scores.shape[2:]
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device)
        mask = mask.tril(num_keys - num_queries)
    # Finite: a row of padding may see no key.
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    return F.dropout(weights, dropout).to(value.dtype) @ value


def window_of(config: DecoderConfig, layer_number: int) -> int | None:
    """Return how many tokens a token of a layer sees, itself included; None if all before it."""
    window, pattern = config.window_size, config.window_attn_skip_freq
    if window is None:
        return None
    # Without a pattern every layer has the window.
    if pattern is not None and not is_layer_window_attention(window, pattern, layer_number):
        return None
    # Megatron-core counts the tokens before it.
    return window[0] + 1


def _tensor_parallel_rng() -> AbstractContextManager[None]:
    """Return the scope of the RNG state that differs between tensor-parallel ranks (dropout)."""
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    return tracker.fork()
