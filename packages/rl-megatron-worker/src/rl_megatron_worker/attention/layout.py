"""How the rows of a micro-batch lie before the model, and how what it gives becomes rows again."""

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
    """Rows laid end to end, of which this rank has all tokens, or some chunks of each."""

    micro_batch: MicroBatch
    packed: PackedSequences
    """Where the tokens of all context-parallel ranks lie."""
    rows: PackedRows
    """The same, as the model's layers are told."""
    tokens: torch.Tensor
    """`[own tokens]` int64."""
    targets: torch.Tensor
    """`[own tokens]` int64: the token after each; any token where there is none."""

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> PackedLayout:
        """Return the layout of a micro-batch whose rows are to be concatenated."""
        packed = micro_batch.packed
        assert packed is not None, "every micro-batch is concatenated"
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
        """Return values of own tokens as `[batch, width, ...]`; padding gets 0.

        Args:
            values: `[own tokens, ...]`.
        """
        return self.packed.unpack(self._join(values)[None])

    def targets_to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of targets, each where its token is; 0 at the first of each row, too."""
        return self.packed.unpack(self._join(values).roll(1, dims=0)[None], skip_first=True)

    def _join(self, values: torch.Tensor) -> torch.Tensor:
        assert self.rows.layout is not None
        return self.rows.layout.join(values)
