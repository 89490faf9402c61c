"""One forward for training, old and reference log-probabilities, so that they cannot differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from rl_interfaces import LossInput
from rl_interfaces.backend.scoring import RowScores

from rl_dtensor_worker.parallel.context import ParallelContext

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_batched_data import BatchedDataDict, TokenScores
    from rl_interfaces.backend.steps import MicroBatch, Step
    from torch import nn

    from rl_dtensor_worker.attention.layout import RowLayout
    from rl_dtensor_worker.model.heads import TokenHead


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
    parallel: ParallelContext = field(default_factory=ParallelContext)
    """The ranks that run it together."""

    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return each token's log-probability, `[batch, seq]` float32; 0 at 0 and at padding."""
        layout, scores = self._scores(micro_batch)
        return layout.targets_to_rows(scores.logprobs)

    def topk_logits(self, micro_batch: MicroBatch, k: int) -> dict[str, torch.Tensor]:
        """Return `topk_logits` and `topk_indices`, `[batch, seq, k]`; 0 at padding.

        Those of position `t` are of token `t + 1`.
        """
        layout, scores = self._scores(micro_batch, top_k=k)
        assert scores.top_k_logits is not None
        assert scores.top_k_indices is not None
        return {
            "topk_logits": layout.to_rows(scores.top_k_logits),
            "topk_indices": layout.to_rows(scores.top_k_indices),
        }

    def logits(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return all logits, `[batch, seq, vocab]` float32: those of position t are of t + 1."""
        layout = self._lay_out(micro_batch)
        output = self.model(input_ids=layout.tokens, use_cache=False, **layout.arguments)
        logits = layout.to_rows(self.parallel.gather_logits(output.logits), masked=False).float()
        return logits if self.temperature == 1.0 else logits / self.temperature

    def for_loss(self, micro_batch: MicroBatch, loss_fn: Any) -> torch.Tensor:
        """Return what `loss_fn` asks for: all logits, or token log-probabilities."""
        if getattr(loss_fn, "input_type", LossInput.LOGITS) is LossInput.LOGPROBS:
            return self.logprobs(micro_batch)
        return self.logits(micro_batch)

    def _lay_out(self, micro_batch: MicroBatch) -> RowLayout:
        return self.parallel.lay_out(self.model, micro_batch, self.width_multiple)

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
    score: Callable[[MicroBatch], dict[str, torch.Tensor]],
    data: BatchedDataDict[Any],
    *,
    steps: Sequence[Step],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return what `score` gives for all rows of `data`, on the CPU.

    Args:
        score: Returns `[batch]` and `[batch, seq, ...]` tensors of a micro-batch's rows.
        data: This rank's rows.
        steps: How they are gone through; at least one micro-batch, even where there are no rows.
        device: Where `score` wants them.
    """
    found = RowScores(data)
    for micro_batch in (micro for step in steps for micro in step.micro_batches(device)):
        found.put(micro_batch.span, score(micro_batch))
    return found.scores
