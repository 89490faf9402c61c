"""Attention over packed sequences, and over sequences sharded among context-parallel ranks.

transformers separates packed sequences by a mask over all pairs of tokens, whose cost is quadratic
in the packed length. Here tokens stay packed in all other layers. For attention the flash kernel
takes them as they are; where it does not run they are gathered into rows, sequences of similar
length together, which need no mask in torch's causal scaled-dot-product attention.

With context parallelism `rl_batched_data.packing.context_shards` says which chunks of each sequence
a rank has. Keys and values are all-gathered; queries stay. The kernel is torch's on every device,
and packed sequences and sliding windows are honoured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from rl_batched_data.packing.context_shards import ContextShards
from rl_batched_data.packing.packed_sequences import group_by_length
from rl_interfaces.backend.attention import RowGroups, attend, attend_to_packed, takes_packed
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_dtensor_worker.parallel import collectives

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.distributed as dist
    from rl_batched_data import PackedSequences
    from rl_batched_data.packing.context_shards import ContextChunks
    from rl_batched_data.packing.shared_prefixes import SharedPrefixes
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

NAME = "rl_packed_sdpa"
# The attribute of a mask that says how the sequences are laid out.
_LAYOUT = "_rl_layout"
WINDOWS_OF_KINDS = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""What transformers' masks of a kind of layer take from the config."""
# In layers of the second kind attention is beside a state-space model (Zamba).
_SEE_ALL = ("full_attention", "hybrid")


class Heads(NamedTuple):
    """The inputs of one layer's attention."""

    query: torch.Tensor
    """`[rows, heads, seq, head_size]`."""
    key: torch.Tensor
    """`[rows, key_value_heads, seq, head_size]`."""
    value: torch.Tensor
    """Like `key`."""


class Window(NamedTuple):
    """How far back in its sequence a token sees."""

    size: int
    """Of a sliding window, the token itself included; or of a chunk."""
    is_chunk: bool = False
    """Whether sequences are divided into chunks from their start, of which a token sees its own."""


class AttentionLayout(Protocol):
    """The layout of a forward's sequences, which computes its attention."""

    def attend(
        self, module: nn.Module, heads: Heads, window: Window | None, **kwargs: Any
    ) -> torch.Tensor:
        """Return causal attention within each sequence, `[rows, seq, heads, head_size]`.

        Args:
            module: The attention layer.
            heads: Its inputs.
            window: How far back a token sees. None: to the start of its sequence.
            kwargs: Further arguments of transformers' attention functions.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRows:
    """Packed sequences gathered into rows of a few widths, padded on the right."""

    groups: RowGroups
    """Sequences of similar length together; padding reads any token."""
    places: torch.Tensor
    """`[total]` int64: index of each token in the flattened groups."""
    packed: PackedSequences
    """The sequences."""

    @classmethod
    def of(cls, packed: PackedSequences) -> AttentionRows:
        """Return the rows of `packed`, on its device.

        Example, sequences of 4, 1 and 3 tokens:
            groups.indices = [[[0, 1, 2, 3], [5, 6, 7, 7]], [[4]]]
            places = [0, 1, 2, 3, 8, 4, 5, 6]
        """
        device = packed.cu_seqlens.device
        edges: list[int] = packed.host_cu_seqlens.tolist()
        starts = torch.tensor(edges[:-1])
        lengths = torch.tensor(edges[1:]) - starts
        places = torch.empty(edges[-1], dtype=torch.int64)
        groups: list[torch.Tensor] = []
        base = 0
        for rows in group_by_length(lengths.tolist()):
            offsets = torch.arange(int(lengths[rows].max()))
            is_token = offsets < lengths[rows, None]
            # Padding reads any token: no token attends to it, and its own output is dropped.
            tokens = (starts[rows, None] + offsets).clamp(max=edges[-1] - 1)
            place = base + torch.arange(tokens.numel()).view(tokens.shape)
            places[tokens[is_token]] = place[is_token]
            base += tokens.numel()
            groups.append(tokens.to(device, non_blocking=True))
        places = places.to(device, non_blocking=True)
        return cls(groups=RowGroups.of(groups), places=places, packed=packed)

    def attend(
        self, module: nn.Module, heads: Heads, window: Window | None, **kwargs: Any
    ) -> torch.Tensor:
        """See `AttentionLayout.attend`."""
        query, key, value = (states[0].transpose(0, 1) for states in heads)
        is_chunked = window is not None and window.is_chunk
        if takes_packed(query, value) and _is_plain(**kwargs) and not is_chunked:
            output = attend_to_packed(
                query,
                key,
                value,
                self.packed.cu_seqlens,
                max_seqlen=self.packed.max_seqlen,
                sliding_window=None if window is None else window.size,
                scale=kwargs.get("scaling"),
            )
            return output[None]
        rows = zip(*(self.groups.gather(states) for states in (query, key, value)), strict=True)
        outputs = [
            _attend_to_rows(module, _heads_of(group), window, **kwargs).flatten(0, 1)
            for group in rows
        ]
        return torch.cat(outputs).index_select(0, self.places)[None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FullRows:
    """Full padded rows, which a block around has gathered before its attention."""

    def attend(
        self, module: nn.Module, heads: Heads, window: Window | None, **kwargs: Any
    ) -> torch.Tensor:
        """See `AttentionLayout.attend`."""
        return _attend_to_rows(module, heads, window, **kwargs)


def _heads_of(rows: Iterable[torch.Tensor]) -> Heads:
    """Return queries, keys and values from `[rows, width, heads, head_size]` each."""
    return Heads(*(states.transpose(1, 2) for states in rows))


def _attend_to_rows(
    module: nn.Module, heads: Heads, window: Window | None, **kwargs: Any
) -> torch.Tensor:
    """Return causal attention of right-padded rows, `[rows, seq, heads, head_size]`."""
    width = heads.query.shape[2]
    if window is not None and window.is_chunk and window.size < width:
        # Chunks are rows of their own, as no token sees another chunk.
        output = _attend_to_rows(module, _chunks_of(heads, window.size), None, **kwargs)
        return output.reshape(heads.query.shape[0], -1, *output.shape[2:])[:, :width]
    # Padding on the right needs no mask: no token sees it, and its own output is dropped.
    size = None if window is None else window.size
    mask = causal_band(width, size, device=heads.query.device)
    return _attend(module, heads, mask, **kwargs)


def _chunks_of(heads: Heads, size: int) -> Heads:
    """Return rows of `size` tokens, `[rows * chunks, heads, size, head_size]`; the last padded."""

    def divided(states: torch.Tensor) -> torch.Tensor:
        padded = F.pad(states, (0, 0, 0, -states.shape[2] % size))
        return padded.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)

    return Heads(*(divided(states) for states in heads))


def _attend(
    module: nn.Module,
    heads: Heads,
    mask: torch.Tensor | None,
    *,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return attention under `mask`, or causal attention, `[rows, seq, heads, head_size]`."""
    given = {"scaling": kwargs.get("scaling"), "dropout": kwargs.get("dropout", 0.0)}
    if (output := _with_sinks_or_cap(heads, mask, softcap, s_aux, **given)) is not None:
        return output
    output, _ = sdpa_attention_forward(module, *heads, mask, **kwargs)
    return output


def _with_sinks_or_cap(
    heads: Heads,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor | None:
    """Return attention that torch's has no argument for; None where its own does.

    Raises:
        ValueError: A layer has both.
    """
    if softcap is not None and sinks is not None:
        raise ValueError("policy.model_name: sinks with capped scores are not supported")
    if sinks is not None:
        return sink_attention(heads, mask, sinks=sinks, **options)
    if softcap is not None:
        return capped_attention(heads, mask, softcap=softcap, **options)
    return None


def _is_plain(
    *,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> bool:
    """Return whether a layer's attention has no dropout, cap on scores or sinks."""
    return dropout == 0.0 and softcap is None and s_aux is None


def capped_attention(
    heads: Heads,
    mask: torch.Tensor | None,
    *,
    softcap: float,
    scaling: float | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return attention with soft-capped scores: `softcap * tanh(scores / softcap)`.

    As in Gemma 2 (arXiv:2408.00118, section 2). torch's scaled-dot-product attention has no cap,
    and transformers ignores the argument there. All scores of the rows are in memory at once.

    Args:
        heads: See `Heads`.
        mask: `[..., seq, key_seq]`, bool or additive. None: causal, aligned to the last key.
        softcap: Bound on the scores.
        scaling: Factor on the scores before the cap. None: `head_size ** -0.5`.
        dropout: Probability with which a weight is dropped.

    Returns:
        `[rows, seq, heads, head_size]`.
    """
    query, key, value = heads
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    scores = query @ key.transpose(-1, -2)
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (softcap * torch.tanh(scores / softcap)).float()
    if mask is None:
        mask = _causal_lower_right(query.shape[2], key.shape[2], device=query.device)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    weights = scores.softmax(-1).to(query.dtype)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2).contiguous()


def sink_attention(
    heads: Heads,
    mask: torch.Tensor | None,
    *,
    sinks: torch.Tensor,
    scaling: float | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return attention in which each head may attend to nothing, as in gpt-oss.

    Torch's fused kernels compute it, see `rl_interfaces.backend.attention.attend`.

    Args:
        heads: See `Heads`.
        mask: `[..., seq, key_seq]`, bool or additive. None: causal, aligned to the last key.
        sinks: `[heads]`: the score of each head's sink.
        scaling: Factor on the scores of keys. None: `head_size ** -0.5`.
        dropout: Probability with which a weight is dropped.

    Returns:
        `[rows, seq, heads, head_size]`.
    """
    output = attend(*heads, mask, dropout=dropout, scale=scaling, sinks=sinks)
    return output.transpose(1, 2)


def _causal_lower_right(width: int, key_width: int, *, device: torch.device) -> torch.Tensor:
    """Return the mask of causal attention in which the last query is at the last key."""
    queries = torch.arange(key_width - width, key_width, device=device)
    return queries[:, None] >= torch.arange(key_width, device=device)


def register_attention() -> None:
    """Make this attention known to transformers, which looks it up by its name in the config."""
    AttentionInterface.register(NAME, packed_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Switch a model from `sdpa` to this attention; return whether the model now uses it.

    Forwards with another mask still take torch's attention.
    """
    config = model.config
    if config._attn_implementation != "sdpa":
        return config._attn_implementation == NAME
    register_attention()
    config._attn_implementation = NAME
    return True


def has_soft_cap(config: PreTrainedConfig) -> bool:
    """Return whether a config caps attention scores, as torch's attention does not."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def use_soft_cap(model: PreTrainedModel) -> None:
    """Switch a model whose config caps attention scores from its default attention to this.

    `sdpa` does not cap them, which is why newer versions of transformers have `eager` as the
    default of such models.
    """
    default = "sdpa" if model._supports_sdpa else "eager"
    if has_soft_cap(model.config) and model.config._attn_implementation == default:
        register_attention()
        model.config._attn_implementation = NAME


def require_packed_attention(model: PreTrainedModel) -> None:
    """Switch `model` to this attention.

    Raises:
        ValueError: The model uses another implementation than `sdpa`.
    """
    if not use_packed_attention(model):
        config = model.config
        raise ValueError(
            "policy.dtensor_cfg: sequence_parallel, context_parallel_size and share_prefixes need "
            f"attn_implementation='sdpa', {type(model).__name__} uses "
            f"{config._attn_implementation!r}"
        )


def packed_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention, within each sequence if the mask is that of `layout_arguments`.

    Args:
        module: The attention layer.
        query: See `Heads`, as `key` and `value`.
        key: See `Heads`.
        value: See `Heads`.
        attention_mask: See `layout_arguments`; another one is applied.
        sliding_window: See `AttentionLayout.attend`, as `kwargs`.
        kwargs: See `AttentionLayout.attend`.

    Returns:
        `[rows, seq, heads, head_size]`, and None for the attention weights.
    """
    layout: AttentionLayout | None = getattr(attention_mask, _LAYOUT, None)
    if layout is None:
        if attention_mask is None and query.shape[2] == key.shape[2]:
            # torch's attention knows no windows, which masks say where transformers makes one.
            attention_mask = causal_band(query.shape[2], sliding_window, device=query.device)
        kwargs["sliding_window"] = sliding_window
        return _attend(module, Heads(query, key, value), attention_mask, **kwargs), None
    window = window_of(module, sliding_window)
    return layout.attend(module, Heads(query, key, value), window, **kwargs), None


def window_of(module: nn.Module, sliding_window: int | None) -> Window | None:
    """Return how far back an attention layer sees.

    Args:
        module: The layer.
        sliding_window: What it passes on. None: a window would be in its mask, which layouts
            replace, and is that of its config.

    Raises:
        ValueError: It restricts attention in another way by its mask alone.
    """
    if sliding_window is not None:
        return Window(sliding_window)
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        kind = _kind_of(getattr(module, "layer_idx", 0), kinds)
    else:
        kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    size = getattr(config, WINDOWS_OF_KINDS.get(kind, ""), None)
    if kind not in _SEE_ALL and size is None:
        raise ValueError(
            "policy: sequence_packing, dtensor_cfg.sequence_parallel and dtensor_cfg."
            f"context_parallel_size ignore masks, and {type(module).__name__} implements its "
            f"{kind} by a mask alone: this model needs padded rows"
        )
    return None if size is None else Window(size, is_chunk=kind == "chunked_attention")


def _kind_of(layer_idx: int | None, kinds: Sequence[str]) -> str:
    """Return the kind of an attention layer; one without a number is shared by several layers."""
    if layer_idx is not None:
        return kinds[layer_idx]
    windows = [kind for kind in kinds if kind in WINDOWS_OF_KINDS]
    return f"{windows[0]} of some layers" if windows else "full_attention"


def layout_arguments(layout: AttentionLayout, device: torch.device) -> dict[str, object]:
    """Return the keyword arguments by which a model's forward attends according to `layout`."""
    # transformers passes a 4-d mask on unchanged, and so builds none over all pairs of tokens. It
    # carries the layout, as not every model passes keyword arguments of other names on.
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    setattr(mask, _LAYOUT, layout)
    return {"attention_mask": mask}


def causal_band(
    width: int, sliding_window: int | None, *, device: torch.device
) -> torch.Tensor | None:
    """Return the mask of a causal sliding window; None if the window covers whole rows."""
    if sliding_window is None or sliding_window >= width:
        return None
    distance = torch.arange(width, device=device)
    distance = distance[:, None] - distance
    return (distance >= 0) & (distance < sliding_window)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRows:
    """Chunks of sequences, with the rows of their queries and of the keys before them."""

    chunks: Sequence[ContextChunks]
    queries: RowGroups
    keys: RowGroups

    @classmethod
    def of(cls, chunks: Sequence[ContextChunks]) -> ChunkRows:
        """Return the rows of `chunks`."""
        return cls(
            chunks=chunks,
            queries=RowGroups.of(chunk.queries for chunk in chunks),
            keys=RowGroups.of(chunk.keys for chunk in chunks),
        )

    def attend(self, heads: Heads, window: Window | None, **kwargs: Any) -> torch.Tensor:
        """Return the attention of all queries, flattened: `[queries, heads, head_size]`."""
        query, key, value = (states[0].transpose(0, 1) for states in heads)
        rows = zip(
            self.queries.gather(query), self.keys.gather(key), self.keys.gather(value), strict=True
        )
        outputs = [
            _attend_to_chunks(_heads_of(group), _mask_of(chunk, window), **kwargs).flatten(0, 1)
            for chunk, group in zip(self.chunks, rows, strict=True)
        ]
        return torch.cat(outputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextRows:
    """This rank's chunks of packed sequences: an `AttentionLayout`."""

    group: dist.ProcessGroup
    """The ranks that shard the sequences."""
    shards: ContextShards
    chunks: ChunkRows

    @classmethod
    def of(cls, packed: PackedSequences, group: dist.ProcessGroup) -> ContextRows:
        """Return this rank's chunks of sequences that are padded to multiples of twice the ranks.

        Raises:
            ValueError: A sequence is padded otherwise.
        """
        shards = ContextShards.of(
            packed.host_cu_seqlens,
            rank=group.rank(),
            num_ranks=group.size(),
            device=packed.cu_seqlens.device,
        )
        return cls(group=group, shards=shards, chunks=ChunkRows.of(shards.chunks))

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
        self, module: nn.Module, heads: Heads, window: Window | None, **kwargs: Any
    ) -> torch.Tensor:
        """See `AttentionLayout.attend`."""
        # Keys and values in one collective. Each rank has queries of its own, so that their
        # gradients are partial and the backward pass reduce-scatters them.
        gathered = collectives.gather_for_sharded_use(
            torch.cat([heads.key, heads.value], dim=-1), self.group, 2
        )
        sizes = [heads.key.shape[-1], heads.value.shape[-1]]
        keys, values = gathered.split(sizes, dim=-1)
        visible = Heads(heads.query, keys, values)
        output = self.chunks.attend(visible, window, **kwargs)
        return output.index_select(0, self.shards.places)[None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """Packed rows that share prefixes: an `AttentionLayout`."""

    shared: SharedPrefixes
    chunks: ChunkRows

    @classmethod
    def of(cls, shared: SharedPrefixes) -> SharedRows:
        """Return the layout of rows that share prefixes."""
        return cls(shared=shared, chunks=ChunkRows.of(shared.chunks))

    def attend(
        self, module: nn.Module, heads: Heads, window: Window | None, **kwargs: Any
    ) -> torch.Tensor:
        """See `AttentionLayout.attend`."""
        output = self.chunks.attend(heads, window, **kwargs)
        return output.index_select(0, self.shared.places)[None]


def _mask_of(chunk: ContextChunks, window: Window | None) -> torch.Tensor | None:
    """Return which keys each query of a chunk sees, see `ContextChunks.mask`."""
    if window is None or not window.is_chunk:
        return chunk.mask(None if window is None else window.size)
    key_width = chunk.keys.shape[1]
    if window.size >= key_width:
        return chunk.mask()
    queries = chunk.query_positions[:, None, :, None]
    keys = torch.arange(key_width, device=queries.device)
    return (keys <= queries) & (keys // window.size == queries // window.size)


def _attend_to_chunks(
    heads: Heads,
    mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """Return attention of chunks of sequences to all keys before them, see `_attend`."""
    given = {"scaling": scaling, "dropout": dropout}
    if (output := _with_sinks_or_cap(heads, mask, softcap, s_aux, **given)) is not None:
        return output
    # Without a mask it is aligned to the last key: a later chunk's first query sees the chunks
    # before it.
    output = attend(*heads, mask, dropout=dropout, scale=scaling)
    return output.transpose(1, 2)
