"""How ranks share what one forward computes: its layers, and its sequences."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_interfaces.backend.steps import Concatenation

from rl_dtensor_worker.attention.layout import lay_out
from rl_dtensor_worker.parallel.tensor import collectives

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch
    import torch.distributed as dist
    from rl_interfaces.backend.steps import MicroBatch
    from torch import nn

    from rl_dtensor_worker.attention.layout import RowLayout
    from rl_dtensor_worker.parallel.tensor.group import TensorParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """The ranks that run one forward together; by default this one alone."""

    tensor_parallel: TensorParallel | None = None
    """Those that share each layer."""
    context_group: dist.ProcessGroup | None = None
    """Those that share each sequence."""

    def lay_out(self, model: nn.Module, micro_batch: MicroBatch, width_multiple: int) -> RowLayout:
        """Return the layout in which `model` reads `micro_batch` on this rank."""
        return lay_out(
            model,
            micro_batch,
            width_multiple=math.lcm(width_multiple, self._sequence_parts),
            cuts_sequence=self._sequence_parts > 1,
            context_group=self.context_group,
        )

    def concatenation(self) -> Concatenation:
        """Return what micro-batches whose rows are concatenated are padded to."""
        if self.context_group is None:
            return Concatenation(total_multiple=self._sequence_parts)
        ranks = self.context_group.size()
        # Each rank has two chunks of every sequence.
        return Concatenation(
            always=True,
            sequence_multiple=2 * ranks,
            total_multiple=math.lcm(2 * ranks, ranks * self._sequence_parts),
        )

    def feature(self, *, packed: bool) -> str | None:
        """Return the config key that asks for more of attention than padded rows do, if any."""
        if self.context_group is not None:
            return f"dtensor_cfg.context_parallel_size={self.context_group.size()}"
        if self._sequence_parts > 1:
            return "dtensor_cfg.sequence_parallel=True"
        return "sequence_packing.enabled=True" if packed else None

    @contextmanager
    def whole_sequences(self) -> Generator[None, None, None]:
        """Cut no sequence inside, for forwards without gradients of any length."""
        ranks = self.tensor_parallel
        with nullcontext() if ranks is None else ranks.whole_sequences():
            yield

    def whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens, `[..., vocab]`, of which the model gives a part."""
        if self.tensor_parallel is None:
            return logits
        return collectives.gather_alike(logits, self.tensor_parallel.group, -1)

    @property
    def _sequence_parts(self) -> int:
        ranks = self.tensor_parallel
        return ranks.size if ranks is not None and ranks.cuts_sequence else 1
