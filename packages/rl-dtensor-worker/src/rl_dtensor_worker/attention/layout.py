"""The layouts in which a model reads a micro-batch, and the way back to the caller's rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rl_dtensor_worker.attention.context import ContextRows
from rl_dtensor_worker.attention.packed import (
    AttentionRows,
    FullRows,
    layout_arguments,
    require_packed_attention,
    use_packed_attention,
)
from rl_dtensor_worker.model.media import media_of, token_columns_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from rl_batched_data import PackedSequences
    from rl_interfaces.backend.steps import MicroBatch
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout(ABC):
    """The arguments of a forward, and the mapping of its outputs back to the caller's rows."""

    tokens: torch.Tensor
    """`[rows, seq]` int64, the model's `input_ids`."""
    targets: torch.Tensor
    """`[rows, seq]` int64: the next token at each position; arbitrary after a row's last."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the model's forward."""

    @abstractmethod
    def to_rows(self, values: torch.Tensor, *, masked: bool = True) -> torch.Tensor:
        """Return per-position values as `[batch, width, ...]`.

        Args:
            values: `[rows, seq, ...]`.
            masked: Whether padding is 0; otherwise it is arbitrary.
        """

    @abstractmethod
    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return per-target values shifted to their token's position; position 0 is 0."""


def lay_out(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    *,
    width_multiple: int,
    shards_sequence: bool,
    context_group: dist.ProcessGroup | None,
) -> RowLayout:
    """Return the layout in which `model` reads `micro_batch`.

    Args:
        model: The model.
        micro_batch: What to lay out.
        width_multiple: Padded rows are completed to a multiple of this.
        shards_sequence: Whether sequence parallelism shards activations between layers.
        context_group: The ranks that shard each packed sequence.

    Raises:
        ValueError: The model or the layout does not support a kind of media in the batch.
    """
    rows = micro_batch.rows
    input_ids, media = rows["input_ids"], media_of(model, rows)
    if media and (shards_sequence or micro_batch.packed is not None):
        raise ValueError(
            f"the batch has {sorted(media)}, whose tokens need unsharded, padded rows: use "
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
    if shards_sequence:
        return layout.for_sequence_parallel(model)
    layout.arguments.update(media)
    for key, column in token_columns_of(model, rows).items():
        layout.arguments[key] = _fit(column, width, width_multiple)
    return layout


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedLayout(RowLayout):
    """Right-padded rows.

    With causal attention no token sees the padding to its right, so no mask is needed and attention
    takes its fastest path.
    """

    is_token: torch.Tensor
    """`[batch, width]` bool: tokens among the caller's rows, padding elsewhere."""

    @classmethod
    def of(
        cls, input_ids: torch.Tensor, lengths: torch.Tensor, *, width: int, width_multiple: int
    ) -> PaddedLayout:
        """Return rows truncated to `width`, then padded to `width_multiple`."""
        tokens = _fit(input_ids, width, width_multiple)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return cls(
            tokens=tokens,
            targets=tokens.roll(-1, dims=1),
            is_token=positions < lengths[:, None],
        )

    def for_sequence_parallel(self, model: PreTrainedModel) -> PaddedLayout:
        """Return the same for a model whose activations are sharded along the sequence.

        From a local shard the model can derive neither a causal mask nor position ids, so both are
        passed explicitly.
        """
        require_packed_attention(model)
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device)[None]
        attention = layout_arguments(FullRows(), self.tokens.device)
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
    """Packed rows.

    Attention implementations other than `rl_packed_sdpa` detect sequence boundaries from where
    `position_ids` restart, which transformers does only without a mask and without a cache.
    """

    packed: PackedSequences

    @classmethod
    def of(
        cls, model: PreTrainedModel, input_ids: torch.Tensor, packed: PackedSequences
    ) -> PackedLayout:
        """Return the packed tokens `[1, total]` and the arguments that mark their boundaries."""
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
    """Packed rows, of which this rank has some chunks."""

    packed: PackedSequences
    """The packed sequences of all ranks."""
    rows: ContextRows

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        packed: PackedSequences,
        group: dist.ProcessGroup,
    ) -> ContextLayout:
        """Return this rank's tokens `[1, total / ranks]`."""
        require_packed_attention(model)
        rows = ContextRows.of(packed, group)
        tokens = packed.pack(input_ids)
        positions = {"position_ids": rows.shard(packed.position_ids)}
        return cls(
            tokens=rows.shard(tokens),
            targets=rows.shard(tokens.roll(-1, dims=1)),
            packed=packed,
            rows=rows,
            arguments=layout_arguments(rows, tokens.device) | positions,
        )

    def to_rows(self, values: torch.Tensor, *, masked: bool = True) -> torch.Tensor:
        """See `RowLayout.to_rows`."""
        return self.packed.unpack(self.rows.gather(values))

    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """See `RowLayout.targets_to_rows`."""
        return self.packed.unpack(self.rows.gather(values).roll(1, dims=1), skip_first=True)


def _fit(column: torch.Tensor, width: int, width_multiple: int) -> torch.Tensor:
    return F.pad(column[:, :width], (0, -width % width_multiple))
