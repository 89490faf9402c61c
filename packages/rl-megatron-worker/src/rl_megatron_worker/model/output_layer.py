"""The end of the model: a matrix, and hidden states that are not multiplied with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel import ColumnParallelLinear


class OutputMatrix(nn.Module):
    """An output layer that hands its input on, for others to multiply it with the weight.

    It is called all the same: data parallelism waits there for the weight to arrive.

    Args:
        layer: The layer whose weight it takes over.
        vocab_size: Tokens, without what completes them.
    """

    def __init__(self, layer: ColumnParallelLinear, *, vocab_size: int) -> None:
        super().__init__()
        self.register_parameter("weight", layer.weight)
        self.vocab_size = vocab_size
        self.tp_group = cast("dist.ProcessGroup", layer.tp_group)
        self.sequence_parallel = layer.sequence_parallel

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, **unread: Any
    ) -> tuple[torch.Tensor, None]:
        """Return the hidden states `[seq, batch, hidden]` of the whole sequence.

        Their gradient is to be alike on all tensor-parallel ranks, which sums over the vocabulary
        are.
        """
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weight as the checkpoint has it, cut along the vocabulary."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
