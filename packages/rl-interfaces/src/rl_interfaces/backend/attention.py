"""Causal attention by torch's kernels, in memory that grows linearly with queries and keys.

`torch.nn.functional.scaled_dot_product_attention` takes any combination of arguments, but on a GPU
its fused kernels do not. Where none fits, it computes `[rows, heads, queries, keys]` scores: tens
of gigabytes at 32,000 tokens. On CUDA, with torch 2.13:

| kernel | mask | heads that share keys (GQA) | dtypes |
|---|---|---|---|
| flash | none, or causal | yes | float16, bfloat16, heads of at most 256 |
| memory-efficient | any | no | those and float32 |

On the CPU the fused kernel takes all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_SIZE = 256


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
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
    """
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
