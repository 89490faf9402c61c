"""One forward for training, old and reference log-probabilities, so that they cannot differ."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rl_interfaces import LossInput

from rl_dtensor_worker import collectives
from rl_dtensor_worker.microbatches import Concatenation
from rl_dtensor_worker.row_layout import lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch.distributed as dist
    from rl_batched_data import BatchedDataDict, TokenScores
    from torch import nn

    from rl_dtensor_worker.head import TokenHead
    from rl_dtensor_worker.microbatches import MicroBatch, Step
    from rl_dtensor_worker.row_layout import RowLayout
    from rl_dtensor_worker.tensor_parallel import TensorParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """A model's forward over micro-batches of any layout.

    Everything that it returns is in the caller's rows, `[batch, seq, ...]`.
    """

    model: nn.Module
    head: TokenHead
    temperature: float
    """Divides the logits, in every call alike."""
    width_multiple: int
    """Padded rows are completed to a multiple of this, inside."""
    tensor_parallel: TensorParallel | None = None
    """The ranks that share each layer."""
    context_group: dist.ProcessGroup | None = None
    """The ranks that share each sequence."""

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
        with (
            nullcontext()
            if self.tensor_parallel is None
            else (self.tensor_parallel.whole_sequences())
        ):
            yield

    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return each token's log-probability, `[batch, seq]` float32; 0 at 0 and at padding."""
        layout, scores = self._scores(micro_batch)
        return layout.targets_to_rows(scores.logprobs)

    def logits(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return all logits, `[batch, seq, vocab]` float32: those of position t are of t + 1."""
        layout = self._lay_out(micro_batch)
        output = self.model(input_ids=layout.tokens, use_cache=False, **layout.arguments)
        logits = layout.to_rows(self.whole_logits(output.logits), masked=False).float()
        return logits if self.temperature == 1.0 else logits / self.temperature

    def whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens, `[..., vocab]`, of which the model gives a part."""
        if self.tensor_parallel is None:
            return logits
        return collectives.gather_alike(logits, self.tensor_parallel.group, -1)

    def for_loss(self, micro_batch: MicroBatch, loss_fn: Any) -> torch.Tensor:
        """Return what `loss_fn` asks for: all logits, or token log-probabilities."""
        if getattr(loss_fn, "input_type", LossInput.LOGITS) is LossInput.LOGPROBS:
            return self.logprobs(micro_batch)
        return self.logits(micro_batch)

    @property
    def _sequence_parts(self) -> int:
        ranks = self.tensor_parallel
        return ranks.size if ranks is not None and ranks.cuts_sequence else 1

    def _lay_out(self, micro_batch: MicroBatch) -> RowLayout:
        return lay_out(
            self.model,
            micro_batch,
            width_multiple=math.lcm(self.width_multiple, self._sequence_parts),
            cuts_sequence=self._sequence_parts > 1,
            context_group=self.context_group,
        )

    def _scores(self, micro_batch: MicroBatch, **asked: Any) -> tuple[RowLayout, TokenScores]:
        layout = self._lay_out(micro_batch)
        scores = self.head.target_scores(
            self.model,
            layout.tokens,
            layout.targets,
            temperature=self.temperature,
            **asked,
            **layout.arguments,
        )
        return layout, scores


def score_rows(
    score: Callable[[MicroBatch], torch.Tensor],
    data: BatchedDataDict[Any],
    *,
    steps: Sequence[Step],
    device: torch.device,
) -> torch.Tensor:
    """Return what `score` gives for all rows of `data`, `[batch, seq]` float32 on the CPU."""
    scores = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
    for micro_batch in (micro for step in steps for micro in step.micro_batches(device)):
        values = score(micro_batch)
        start, end = micro_batch.span
        width = min(values.shape[1], scores.shape[1])
        scores[start:end, :width] = values[: end - start, :width].cpu()
    return scores
