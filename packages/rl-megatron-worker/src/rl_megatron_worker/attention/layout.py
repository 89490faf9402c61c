"""The packed layout of a micro-batch: rows to tokens before the model, and back after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from megatron.core import parallel_state

from rl_megatron_worker.attention.packed import PackedRows

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from rl_batched_data import PackedSequences
    from rl_interfaces.backend.steps import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout:
    """Packed rows; under context parallelism this rank holds two chunks of each."""

    micro_batch: MicroBatch
    packed: PackedSequences
    """The packing, over the tokens of all context-parallel ranks."""
    rows: PackedRows
    """The same as `PackedSeqParams`, which the model's layers take."""
    tokens: torch.Tensor
    """`[own tokens]` int64."""
    targets: torch.Tensor
    """`[own tokens]` int64: the next token of each token; arbitrary at the end of a row."""

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> PackedLayout:
        """Return the layout of a packed micro-batch."""
        packed = micro_batch.packed
        assert packed is not None, "every micro-batch is packed"
        group = cast("dist.ProcessGroup", parallel_state.get_context_parallel_group())
        rows = PackedRows.of(packed.cu_seqlens, max_seqlen=packed.max_seqlen, group=group)
        assert rows.layout is not None
        tokens = packed.pack(micro_batch.rows["input_ids"])[0]
        return cls(
            micro_batch=micro_batch,
            packed=packed,
            rows=rows,
            tokens=rows.layout.take(tokens),
            targets=rows.layout.take(tokens.roll(-1)),
        )

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return per-token values of this rank as gathered `[batch, width, ...]`; padding gets 0.

        Args:
            values: `[own tokens, ...]`.
        """
        return self.packed.unpack(self._gather(values)[None])

    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return per-target values at the targets' positions; position 0 of each row gets 0."""
        return self.packed.unpack(self._gather(values).roll(1, dims=0)[None], skip_first=True)

    def _gather(self, values: torch.Tensor) -> torch.Tensor:
        assert self.rows.layout is not None
        return self.rows.layout.gather_in_order(values)
