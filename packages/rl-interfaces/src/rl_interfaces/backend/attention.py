"""Causal attention by torch's kernels, in memory that grows linearly with queries and keys.

`torch.nn.functional.scaled_dot_product_attention` takes any combination of arguments, but on a GPU
its fused kernels do not. Where none fits, it computes `[rows, heads, queries, keys]` scores: tens
of gigabytes at 32,000 tokens. On CUDA, with torch 2.13:

| kernel | mask | heads that share keys (GQA) | dtypes |
|---|---|---|---|
| flash | none, or causal | yes | float16, bfloat16, heads of at most 256 |
| memory-efficient | any | no | those and float32 |

On the CPU the fused kernel takes all of them.

Packed sequences take the flash kernel in one call where it runs (`takes_packed`). Elsewhere, those
of similar length are gathered into rows (`RowGroups`).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

if TYPE_CHECKING:
    from collections.abc import Iterable

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_SIZE = 256
_FLASH_CAPABILITY = (8, 0)
# Since torch 2.12; before, the kernel for packed sequences is given a key for each head.
_PACKED_SHARES_KEYS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention, `[rows, heads, queries, head_size]`.

    Args:
        query: `[rows, heads, queries, head_size]`, any float.
        key: `[rows, key_value_heads, keys, head_size]`; `heads / key_value_heads` neighbouring
            heads share one.
        value: Like `key`.
        mask: Which keys each query sees, bool, broadcastable to `[rows, heads, queries, keys]`.
            None: the last query sees all keys, the one before it all but the last, and so on.
        dropout: Probability of a weight to be dropped.
        scale: `head_size ** -0.5` when None.
        sinks: `[heads]`: one more score in each softmax of a head, whose value is zero: the head
            may attend to nothing (arXiv:2309.17453, section 3.2, and the model card of gpt-oss).
    """
    if sinks is not None:
        # That of the heads, before they get another dim.
        own, size = query.shape[3] ** -0.5 if scale is None else scale, value.shape[3]
        query, key, value, mask = _with_sink(query, key, value, mask, scores=sinks / own)
        output = attend(query, key, value, mask, dropout=dropout, scale=own)
        return output[..., :size]
    shared = query.shape[1] // key.shape[1]
    takes_shared = takes_shared_keys(query.device.type, query.dtype, head_size=query.shape[3])
    if shared > 1 and not (mask is None and takes_shared):
        key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
    is_square = mask is None and query.shape[2] == key.shape[2]
    if mask is None and not is_square:
        mask = causal_lower_right(query.shape[2], key.shape[2])
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_square,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _with_sink(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scores: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the arguments of `attend` with one more key, in one more dim of queries and keys.

    Heads are as large in all of them.

    Args:
        query: See `attend`, like the next three.
        key: `[rows, key_value_heads, keys, head_size]`.
        value: Like `key`.
        mask: Bool or additive.
        scores: `[heads]`: of the key that is added, unscaled.
    """
    size = query.shape[3]
    # Fused kernels want head sizes in multiples of 8.
    extra = 8 - size % 8
    own = query.new_zeros(*query.shape[:3], extra)
    own[..., 0] = scores.to(query.dtype)[:, None]
    # The first key, which causal masks that are aligned to the last one show to every query.
    # Values are as wide, which the flash kernel wants.
    key = F.pad(key, (0, extra, 1, 0))
    value = F.pad(value, (0, size + extra - value.shape[3], 1, 0))
    key[..., 0, size] = 1.0
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)
    return torch.cat([query, own], -1), key, value, mask


def attend_to_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    max_seqlen: int,
    sliding_window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return causal attention within each of some packed sequences, `[tokens, heads, head_size]`.

    Only where `takes_packed`.

    Args:
        query: `[tokens, heads, head_size]`, float16 or bfloat16.
        key: `[tokens, key_value_heads, head_size]`.
        value: Like `key`.
        cu_seqlens: `[sequences + 1]` int32: the start of each sequence, and the total.
        max_seqlen: The longest sequence.
        sliding_window: How many tokens a token sees, itself included. None: all before it.
        scale: `head_size ** -0.5` when None.
    """
    # The kernel counts the tokens before; -1 is all of them.
    before = -1 if sliding_window is None else sliding_window - 1
    kernel = varlen_attn
    if (shared_by := query.shape[1] // key.shape[1]) > 1:
        if _PACKED_SHARES_KEYS:
            kernel = partial(varlen_attn, enable_gqa=True)
        else:
            key, value = (each.repeat_interleave(shared_by, 1) for each in (key, value))
    output = kernel(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scale,
        window_size=(before, 0),
    )
    assert isinstance(output, torch.Tensor), "no auxiliary output was asked for"
    return output


def takes_packed(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the flash kernel takes these, heads' sizes in the last dim."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in _FLASH_DTYPES
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= _FLASH_HEAD_SIZE
        and torch.cuda.get_device_capability(query.device) >= _FLASH_CAPABILITY
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroups:
    """Groups of rows of tokens, those of a group equally wide."""

    indices: list[torch.Tensor]
    """The tokens of each group, `[rows, width]` int64."""
    order: torch.Tensor
    """All of them, flattened."""

    @classmethod
    def of(cls, groups: Iterable[torch.Tensor]) -> RowGroups:
        """Return these groups, at least one."""
        found = [*groups]
        return cls(indices=found, order=torch.cat([tokens.flatten() for tokens in found]))

    def gather(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Return the tokens of each group, `[rows, width, ...]`.

        One gather for all groups, whose gradient is a sum without sorting.

        Args:
            states: `[tokens, ...]`.
        """
        shapes = [tokens.shape for tokens in self.indices]
        parts = states.index_select(0, self.order).split([shape.numel() for shape in shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def attend_to_cache(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention of one token per row, `[rows, heads, head_size]`.

    The heads that share keys become the queries of these, so that no key is repeated.

    Args:
        query: `[rows, heads, head_size]`, any float.
        keys: `[rows, key_value_heads, capacity, head_size]`, see `attend`.
        values: Like `keys`.
        mask: The keys that the token sees, `[rows, capacity]` bool.
        scale: `head_size ** -0.5` when None.
    """
    rows, heads, size = query.shape
    output = F.scaled_dot_product_attention(
        query.view(rows, keys.shape[1], heads // keys.shape[1], size),
        keys,
        values,
        attn_mask=mask[:, None, None],
        scale=scale,
    )
    return output.reshape(rows, heads, values.shape[3])


def takes_shared_keys(device_type: str, dtype: torch.dtype, *, head_size: int) -> bool:
    """Return whether a fused kernel takes heads that share keys, where there is no mask.

    Args:
        device_type: `cuda` or `cpu`.
        dtype: Of the queries.
        head_size: Of the queries.
    """
    if device_type == "cpu":
        return True
    return dtype in _FLASH_DTYPES and head_size <= _FLASH_HEAD_SIZE
