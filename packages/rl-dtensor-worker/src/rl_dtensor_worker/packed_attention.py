"""Attention over concatenated sequences whose cost is that of each sequence alone.

transformers tells packed sequences apart by a mask of all tokens by all tokens, which costs the
square of their sum. Here the tokens go through everything else concatenated; for attention alone
they are laid out as rows, sequences of about one length together, and go through torch's causal
scaled-dot-product attention, which then needs no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from rl_batched_data import PackedSequences
    from torch import nn

NAME = "rl_packed_sdpa"
# Rows of a group are at most this much shorter than its longest: padding against kernel launches.
_SHORTEST_SHARE = 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRows:
    """Where the tokens of a concatenation lie once its sequences are rows of a few widths."""

    groups: list[torch.Tensor]
    """Per group, `[rows, width]` int64: the token at each place; any token where there is none."""
    places: torch.Tensor
    """`[total]` int64: the place of each token in the groups, laid end to end."""

    @classmethod
    def of(cls, packed: PackedSequences) -> AttentionRows:
        """Return the rows of `packed`, on its device.

        Example, sequences of 4, 1 and 3 tokens:
            groups = [[[0, 1, 2, 3], [5, 6, 7, 7]], [[4]]]
            places = [0, 1, 2, 3, 8, 4, 5, 6]
        """
        edges: list[int] = packed.cu_seqlens.tolist()
        starts = torch.tensor(edges[:-1])
        lengths = torch.tensor(edges[1:]) - starts
        places = torch.empty(edges[-1], dtype=torch.int64)
        groups: list[torch.Tensor] = []
        base = 0
        for rows in group_by_length(lengths.tolist()):
            offsets = torch.arange(int(lengths[rows].max()))
            is_token = offsets < lengths[rows, None]
            tokens = (starts[rows, None] + offsets).clamp(max=edges[-1] - 1)
            place = base + torch.arange(tokens.numel()).view(tokens.shape)
            places[tokens[is_token]] = place[is_token]
            base += tokens.numel()
            groups.append(tokens.to(packed.cu_seqlens.device))
        return cls(groups=groups, places=places.to(packed.cu_seqlens.device))


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Return the sequences in groups of about one length, the longest first, none of length 0.

    Example: [4, 1, 3] -> [[0, 2], [1]]
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if lengths[index] == 0:
            continue
        if groups and lengths[index] >= _SHORTEST_SHARE * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def use_packed_attention(model: nn.Module) -> bool:
    """Let a model that uses torch's attention use this one; return whether it does.

    Everything that is not packed takes torch's attention as before.
    """
    config: Any = model.config
    if config._attn_implementation != "sdpa":
        return config._attn_implementation == NAME
    AttentionInterface.register(NAME, packed_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config._attn_implementation = NAME
    return True


def packed_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attention_rows: AttentionRows | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention, within each sequence where `attention_rows` tells them apart.

    Args:
        module: The attention layer.
        query: `[1, heads, total, head_size]`.
        key: `[1, key_value_heads, total, head_size]`.
        value: Like `key`.
        attention_mask: Not read where `attention_rows` is given.
        attention_rows: The sequences, see `AttentionRows`.
        sliding_window: How many tokens a token sees, itself among them. None: all before it.
        kwargs: What transformers passes to its own function.

    Returns:
        `[1, total, heads, head_size]`, and None for the attention weights.
    """
    if attention_rows is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, sliding_window=sliding_window, **kwargs
        )
        return output, None
    outputs: list[torch.Tensor] = []
    for tokens in attention_rows.groups:
        # [heads, total, size] -> [rows, heads, width, size]
        rows_query, rows_key, rows_value = (
            states[0][:, tokens].transpose(0, 1) for states in (query, key, value)
        )
        mask = _band(tokens.shape[1], sliding_window, device=query.device)
        output, _ = sdpa_attention_forward(module, rows_query, rows_key, rows_value, mask, **kwargs)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs).index_select(0, attention_rows.places)[None], None


def _band(width: int, sliding_window: int | None, *, device: torch.device) -> torch.Tensor | None:
    """Return the mask of a causal window, or None where the window is wider than the rows."""
    if sliding_window is None or sliding_window >= width:
        return None
    distance = torch.arange(width, device=device)
    distance = distance[:, None] - distance
    return (distance >= 0) & (distance < sliding_window)
