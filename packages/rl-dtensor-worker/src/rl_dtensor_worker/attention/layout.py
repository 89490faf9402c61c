"""How the rows of a micro-batch lie before the model, and how what it gives becomes rows again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rl_dtensor_worker.attention.context import ContextRows
from rl_dtensor_worker.attention.packed import (
    AttentionRows,
    WholeRows,
    layout_arguments,
    require_own_attention,
    use_packed_attention,
)
from rl_dtensor_worker.model.media import media_of, token_columns_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from rl_batched_data import PackedSequences
    from rl_interfaces.backend.steps import MicroBatch
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout(ABC):
    """What a forward takes, and the way back to the caller's rows."""

    tokens: torch.Tensor
    """`[rows, seq]` int64, as the model gets them."""
    targets: torch.Tensor
    """`[rows, seq]` int64: the token after each; any token where there is none."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """What else the model's forward takes."""

    @abstractmethod
    def to_rows(self, values: torch.Tensor, *, masked: bool = True) -> torch.Tensor:
        """Return values of positions as `[batch, width, ...]`.

        Args:
            values: `[rows, seq, ...]`.
            masked: Whether what is no token gets 0; if not, it may have anything.
        """

    @abstractmethod
    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of targets, each where its token is; 0 at the first of each row, too."""


def lay_out(
    model: nn.Module,
    micro_batch: MicroBatch,
    *,
    width_multiple: int,
    cuts_sequence: bool,
    context_group: dist.ProcessGroup | None,
) -> RowLayout:
    """Return the layout in which `model` reads `micro_batch`.

    Args:
        model: The model.
        micro_batch: What to lay out.
        width_multiple: Padded rows are completed to a multiple of this.
        cuts_sequence: Whether the model's forward sees parts of the sequences between its layers.
        context_group: The ranks that share each sequence of a concatenation.

    Raises:
        ValueError: The model takes no media of a kind that there are, or cannot with this layout.
    """
    rows = micro_batch.rows
    input_ids, media = rows["input_ids"], media_of(model, rows)
    if media and (cuts_sequence or micro_batch.packed is not None):
        raise ValueError(
            f"the batch has {sorted(media)}, whose tokens must lie in whole, padded rows: use "
            "policy.dynamic_batching instead of policy.sequence_packing, and neither "
            "policy.dtensor_cfg.sequence_parallel nor context_parallel_size"
        )
    if micro_batch.packed is not None and context_group is not None:
        return ContextLayout.of(model, input_ids, micro_batch.packed, context_group)
    if micro_batch.packed is not None:
        return PackedLayout.of(model, input_ids, micro_batch.packed)
    lengths = rows["input_lengths"]
    width = micro_batch.width or min(int(lengths.max()), input_ids.shape[1])
    layout = PaddedLayout.of(input_ids, lengths, width=width, width_multiple=width_multiple)
    if cuts_sequence:
        return layout.for_parts(model)
    layout.arguments.update(media)
    for key, column in token_columns_of(model, rows).items():
        layout.arguments[key] = _fit(column, width, width_multiple)
    return layout


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedLayout(RowLayout):
    """Right-padded rows.

    Attention is causal and padding lies on the right, so that no real token sees it: no mask is
    needed, and attention takes its fastest path.
    """

    is_token: torch.Tensor
    """`[batch, width]` bool, of the caller's rows."""

    @classmethod
    def of(
        cls, input_ids: torch.Tensor, lengths: torch.Tensor, *, width: int, width_multiple: int
    ) -> PaddedLayout:
        """Return rows cut to `width`, then completed to `width_multiple`."""
        tokens = _fit(input_ids, width, width_multiple)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return cls(
            tokens=tokens,
            targets=tokens.roll(-1, dims=1),
            is_token=positions < lengths[:, None],
        )

    def for_parts(self, model: nn.Module) -> PaddedLayout:
        """Return the same for a model whose layers see parts of the sequences.

        It can then derive neither a mask nor positions from what it sees.
        """
        require_own_attention(model)
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device)[None]
        attention = layout_arguments(WholeRows(), self.tokens.device)
        return replace(self, arguments={**attention, "position_ids": positions})

    def to_rows(self, values: torch.Tensor, *, masked: bool = True) -> torch.Tensor:
        """See `RowLayout.to_rows`."""
        width, trailing = self.is_token.shape[1], values.ndim - 2
        rows = values[:, :width]
        if rows.shape[1] < width:
            rows = F.pad(rows, (0, 0) * trailing + (0, width - rows.shape[1]))
        if not masked:
            return rows
        return torch.where(self.is_token.view(*self.is_token.shape, *[1] * trailing), rows, 0)

    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """See `RowLayout.targets_to_rows`."""
        first = torch.zeros_like(values[:, :1])
        return self.to_rows(torch.cat([first, values[:, :-1]], dim=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout(RowLayout):
    """Rows laid end to end.

    With an attention that is not ours, transformers tells sequences apart by where `position_ids`
    restart, provided that there is neither a mask nor a cache.
    """

    packed: PackedSequences

    @classmethod
    def of(cls, model: nn.Module, input_ids: torch.Tensor, packed: PackedSequences) -> PackedLayout:
        """Return the tokens `[1, total]`, and what keeps the sequences apart."""
        tokens = packed.pack(input_ids)
        arguments: dict[str, Any] = {"attention_mask": None, "position_ids": packed.position_ids}
        if use_packed_attention(model):
            arguments |= layout_arguments(AttentionRows.of(packed), tokens.device)
        targets = tokens.roll(-1, dims=1)
        return cls(tokens=tokens, targets=targets, packed=packed, arguments=arguments)

    def to_rows(self, values: torch.Tensor, *, masked: bool = True) -> torch.Tensor:
        """See `RowLayout.to_rows`."""
        return self.packed.unpack(values)

    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """See `RowLayout.targets_to_rows`."""
        return self.packed.unpack(values.roll(1, dims=1), skip_first=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextLayout(RowLayout):
    """Rows laid end to end, of which this rank has some chunks."""

    packed: PackedSequences
    """Where the tokens of all ranks lie."""
    rows: ContextRows

    @classmethod
    def of(
        cls,
        model: nn.Module,
        input_ids: torch.Tensor,
        packed: PackedSequences,
        group: dist.ProcessGroup,
    ) -> ContextLayout:
        """Return this rank's tokens `[1, total / ranks]`."""
        require_own_attention(model)
        rows = ContextRows.of(packed, group)
        tokens = packed.pack(input_ids)
        positions = {"position_ids": rows.take(packed.position_ids)}
        return cls(
            tokens=rows.take(tokens),
            targets=rows.take(tokens.roll(-1, dims=1)),
            packed=packed,
            rows=rows,
            arguments=layout_arguments(rows, tokens.device) | positions,
        )

    def to_rows(self, values: torch.Tensor, *, masked: bool = True) -> torch.Tensor:
        """See `RowLayout.to_rows`."""
        return self.packed.unpack(self.rows.join(values))

    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """See `RowLayout.targets_to_rows`."""
        return self.packed.unpack(self.rows.join(values).roll(1, dims=1), skip_first=True)


def _fit(column: torch.Tensor, width: int, width_multiple: int) -> torch.Tensor:
    return F.pad(column[:, :width], (0, -width % width_multiple))
