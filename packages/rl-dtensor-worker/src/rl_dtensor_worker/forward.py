"""The forward pass of every call: log-probabilities, logits and scores over micro-batches.

Training, old and reference log-probabilities share it, so that they cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_dtensor_worker.model.heads import output_of_layer
from rl_dtensor_worker.parallel.context import ParallelContext

if TYPE_CHECKING:
    from rl_batched_data import TokenScores
    from rl_interfaces.backend.steps import MicroBatch
    from transformers import PreTrainedModel

    from rl_dtensor_worker.attention.layout import RowLayout
    from rl_dtensor_worker.model.heads import TokenHead


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """A model's forward over micro-batches of any layout.

    All results are in the caller's rows, `[batch, seq, ...]`.
    """

    model: PreTrainedModel
    head: TokenHead
    temperature: float
    """Divides the logits, in every call."""
    width_multiple: int
    """Padded rows are padded further to a multiple of this, inside."""
    parallel: ParallelContext = field(default_factory=ParallelContext)
    """The ranks that run one forward together."""

    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return each token's log-probability, `[batch, seq]` float32; 0 at 0 and at padding."""
        layout, scores = self._scores(micro_batch)
        return layout.targets_to_rows(scores.logprobs)

    def topk_logits(self, micro_batch: MicroBatch, k: int) -> dict[str, torch.Tensor]:
        """Return `topk_logits` and `topk_indices`, `[batch, seq, k]`; 0 at padding.

        Position `t` has the logits that predict token `t + 1`.
        """
        layout, scores = self._scores(micro_batch, top_k=k)
        assert scores.top_k_logits is not None
        assert scores.top_k_indices is not None
        return {
            "topk_logits": layout.to_rows(scores.top_k_logits),
            "topk_indices": layout.to_rows(scores.top_k_indices),
        }

    def logits(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return all logits, `[batch, seq, vocab]` float32: `logits[:, t]` predict `t + 1`."""
        layout = self._lay_out(micro_batch)
        output = self.model(input_ids=layout.tokens, use_cache=False, **layout.arguments)
        logits = layout.to_rows(self.parallel.gather_logits(output.logits), masked=False).float()
        return logits if self.temperature == 1.0 else logits / self.temperature

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueForward:
    """A reward or value model's forward over micro-batches of any layout.

    Scores are the score layer's output at every token: a sequence classifier's own pooling of each
    row's last token supports neither explicit lengths nor packing.
    """

    model: PreTrainedModel
    layer: nn.Linear
    is_reward: bool
    """Whether a row has one score, at its last token."""
    width_multiple: int
    """Padded rows are padded further to a multiple of this, inside."""
    parallel: ParallelContext = field(default_factory=ParallelContext)
    """The ranks that run one forward together."""

    def values(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the score of each token, `[batch, seq]` float32; padding is 0."""
        layout = self.parallel.lay_out(self.model, micro_batch, self.width_multiple)
        with output_of_layer(self.model, self.layer):
            values = self.model(input_ids=layout.tokens, use_cache=False, **layout.arguments)
        return layout.to_rows(values.float().squeeze(-1))

    def scores(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return float32 `[batch]` of a reward model, `[batch, seq]` of a value model."""
        values = self.values(micro_batch)
        if not self.is_reward:
            return values
        last = micro_batch.rows["input_lengths"][:, None] - 1
        return values.gather(1, last).squeeze(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutput:
    """A language model's `ForwardOutput`; each method runs the model's forward."""

    forward: Forward
    micro_batch: MicroBatch

    def logprobs(self) -> torch.Tensor:
        """See `ForwardOutput.logprobs`."""
        return self.forward.logprobs(self.micro_batch)

    def logits(self, *, sharded: bool = False) -> torch.Tensor:
        """See `ForwardOutput.logits`; they are gathered in any case."""
        return self.forward.logits(self.micro_batch)

    def topk_logits(self, k: int) -> dict[str, torch.Tensor]:
        """See `ForwardOutput.topk_logits`."""
        return self.forward.topk_logits(self.micro_batch, k)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueOutput:
    """A reward or value model's `ForwardOutput`, which has scores in place of logits."""

    forward: ValueForward
    micro_batch: MicroBatch

    def logprobs(self) -> torch.Tensor:
        """Raise: there are none.

        Raises:
            ValueError: Always.
        """
        raise ValueError("policy.head: reward and value models have no log-probabilities")

    def logits(self, *, sharded: bool = False) -> torch.Tensor:
        """Return float32 scores: `[batch]` of a reward model, `[batch, seq]` of a value model."""
        return self.forward.scores(self.micro_batch)

    def topk_logits(self, k: int) -> dict[str, torch.Tensor]:
        """Raise: there are none.

        Raises:
            ValueError: Always.
        """
        raise ValueError("policy.head: reward and value models have no logits")
