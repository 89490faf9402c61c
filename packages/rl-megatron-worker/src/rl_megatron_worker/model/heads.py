"""What the last stage makes of hidden states: one way for training, old and reference scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from rl_batched_data.logprobs.api import target_scores
from rl_interfaces import LossInput

from rl_megatron_worker.model.build import output_matrix, scoring_options

if TYPE_CHECKING:
    from rl_batched_data import TokenScores
    from torch import nn

    from rl_megatron_worker.attention.layout import PackedLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenHead:
    """Scores of tokens by the hidden states that the last stage returns.

    Everything that it returns is in the caller's rows, `[batch, seq, ...]`, and alike on the ranks
    that share them.
    """

    chunk: nn.Module
    """The last one of the model."""
    vocab_size: int
    temperature: float
    """Divides the logits, in every call alike."""

    def logprobs(self, layout: PackedLayout, hidden: torch.Tensor) -> torch.Tensor:
        """Return each token's log-probability, `[batch, seq]` float32; 0 at 0 and at padding."""
        return layout.targets_to_rows(self._scores(layout, hidden).logprobs)

    def topk_logits(
        self, layout: PackedLayout, hidden: torch.Tensor, *, k: int
    ) -> dict[str, torch.Tensor]:
        """Return `topk_logits` and `topk_indices`, `[batch, seq, k]`; 0 at padding.

        Those of position `t` are of token `t + 1`.
        """
        scores = self._scores(layout, hidden, top_k=k)
        assert scores.top_k_logits is not None
        assert scores.top_k_indices is not None
        return {
            "topk_logits": layout.to_rows(scores.top_k_logits),
            "topk_indices": layout.to_rows(scores.top_k_indices),
        }

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return all logits, `[tokens, vocab]` float32, without the temperature."""
        matrix = output_matrix(self.chunk)
        own = copy_to_tensor_model_parallel_region(hidden) @ matrix.T
        logits = gather_from_tensor_model_parallel_region(own.contiguous())
        return logits[..., : self.vocab_size].float()

    def for_loss(self, layout: PackedLayout, hidden: torch.Tensor, loss_fn: Any) -> torch.Tensor:
        """Return what `loss_fn` asks for: all logits, or token log-probabilities."""
        if getattr(loss_fn, "input_type", LossInput.LOGITS) is LossInput.LOGPROBS:
            return self.logprobs(layout, hidden)
        return layout.to_rows(self.logits(hidden) / self.temperature)

    def _scores(self, layout: PackedLayout, hidden: torch.Tensor, **asked: Any) -> TokenScores:
        return target_scores(
            hidden,
            layout.targets,
            temperature=self.temperature,
            **asked,
            **scoring_options(self.chunk),
        )
