"""The ranks that run one forward together, and torch's own context-parallel contexts."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_interfaces.backend.steps import Concatenation
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

from rl_dtensor_worker.attention.layout import lay_out
from rl_dtensor_worker.parallel.tensor import collectives

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

    import torch
    import torch.distributed as dist
    from rl_interfaces.backend.steps import MicroBatch
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from rl_dtensor_worker.attention.layout import RowLayout
    from rl_dtensor_worker.parallel.tensor.group import TensorParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelContext:
    """The ranks that run one forward together; by default this one alone."""

    tensor_parallel: TensorParallel | None = None
    """The ranks that shard each layer."""
    context_group: dist.ProcessGroup | None = None
    """The ranks that shard each sequence from end to end of the model."""

    def lay_out(
        self, model: PreTrainedModel, micro_batch: MicroBatch, width_multiple: int
    ) -> RowLayout:
        """Return the layout in which `model` reads `micro_batch` on this rank."""
        return lay_out(
            model,
            micro_batch,
            width_multiple=math.lcm(width_multiple, self._sequence_shards),
            shards_sequence=self._sequence_shards > 1,
            context_group=self.context_group,
        )

    def concatenation(self) -> Concatenation:
        """Return the multiples to which packed micro-batches are padded."""
        if self.context_group is None:
            return Concatenation(total_multiple=self._sequence_shards)
        ranks = self.context_group.size()
        # Each rank has two chunks of every sequence, see `rl_batched_data.packing.context_shards`.
        return Concatenation(
            always=True,
            sequence_multiple=2 * ranks,
            total_multiple=math.lcm(2 * ranks, ranks * self._sequence_shards),
        )

    def feature(self, *, packed: bool) -> str | None:
        """Return the config key and value that attention must support beyond padded rows, if any.

        Args:
            packed: Whether micro-batches are packed.
        """
        if self.context_group is not None:
            return f"dtensor_cfg.context_parallel_size={self.context_group.size()}"
        if self._sequence_shards > 1:
            return "dtensor_cfg.sequence_parallel=True"
        return "sequence_packing.enabled=True" if packed else None

    @contextmanager
    def unsharded_sequences(self) -> Generator[None, None, None]:
        """Switch sequence parallelism off inside, see `TensorParallel.unsharded_sequences`."""
        tp = self.tensor_parallel
        with nullcontext() if tp is None else tp.unsharded_sequences():
            yield

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the full logits `[..., vocab]` from `[..., vocab / tp]`. Collective."""
        if self.tensor_parallel is None:
            return logits
        return collectives.gather_for_replicated_use(logits, self.tensor_parallel.group, -1)

    @property
    def _sequence_shards(self) -> int:
        tp = self.tensor_parallel
        return tp.size if tp is not None and tp.sequence_parallel else 1


def create_context_parallel_ctx(
    cp_mesh: DeviceMesh,
    cp_buffers: list[torch.Tensor],
    cp_seq_dims: list[int],
    cp_no_restore_buffers: set[torch.Tensor],
    cp_rotate_method: str | None = None,
) -> AbstractContextManager[None]:
    """Return torch's context-parallel context over `cp_buffers`.

    Args:
        cp_mesh: The one-axis mesh of the ranks that shard each sequence.
        cp_buffers: Tensors that are sharded along their sequence dim inside.
        cp_seq_dims: The sequence dim of each buffer.
        cp_no_restore_buffers: The buffers that need not be restored on exit.
        cp_rotate_method: `allgather` or `alltoall`: how keys and values are exchanged.
    """
    if cp_rotate_method is not None:
        set_rotate_method(cp_rotate_method)
    return context_parallel(
        cp_mesh,
        buffers=cp_buffers,
        buffer_seq_dims=cp_seq_dims,
        no_restore_buffers=cp_no_restore_buffers,
    )


@contextmanager
def train_context(
    cp_context: AbstractContextManager[None] | None = None,
) -> Generator[None, None, None]:
    """Enter `cp_context` with the attention kernels that it supports; do nothing for None."""
    with ExitStack() as stack:
        if cp_context is not None:
            # torch's context parallelism has no rule for the math kernel.
            stack.enter_context(
                sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
            )
            stack.enter_context(cp_context)
        yield
