"""Scores of a batch's rows, and the output of a forward pass that gives plain logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rl_batched_data import BatchedDataDict, token_scores

from rl_interfaces.backend.steps import MicroBatch, Span


class RowScores:
    """The scores of all rows of a batch, on the CPU; positions that no micro-batch gives are 0.

    Args:
        data: The rows.
    """

    def __init__(self, data: BatchedDataDict[Any]) -> None:
        self._shape = data["input_ids"].shape
        self.scores: dict[str, torch.Tensor] = {}

    def put(self, span: Span, values: Mapping[str, torch.Tensor]) -> None:
        """Store the scores of the rows `span`; `values` may have masked rows beyond them.

        Args:
            span: Rows of the batch.
            values: `[rows]` or `[rows, seq, ...]` each; where the widths differ, the wider one ends
                in padding.
        """
        start, end = span
        for key, rows in values.items():
            if key not in self.scores:
                shape = (*self._shape[: min(rows.ndim, 2)], *rows.shape[2:])
                self.scores[key] = torch.zeros(shape, dtype=rows.dtype)
            target, taken = self.scores[key][start:end], rows[: end - start]
            if rows.ndim == 1:
                target.copy_(taken)
                continue
            width = min(target.shape[1], taken.shape[1])
            target[:, :width] = taken[:, :width].cpu()


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsOutput:
    """A `ForwardOutput` of a model that returns full logits of padded rows."""

    raw: torch.Tensor
    """`[batch, seq, vocab]`, any float, without temperature; `raw[:, t]` predict token `t + 1`."""
    micro_batch: MicroBatch
    temperature: float = 1.0

    def logprobs(self) -> torch.Tensor:
        """See `ForwardOutput.logprobs`."""
        tokens = self.micro_batch.rows["input_ids"]
        scores = token_scores(self.raw, tokens, temperature=self.temperature)
        return scores.logprobs.where(self._is_token, 0.0)

    def logits(self, *, sharded: bool = False) -> torch.Tensor:
        """See `ForwardOutput.logits`; no rank has a shard of the vocabulary."""
        return self.raw.float() / self.temperature

    def topk_logits(self, k: int) -> dict[str, torch.Tensor]:
        """See `ForwardOutput.topk_logits`."""
        values, indices = self.logits().topk(k, dim=-1)
        is_token = self._is_token[..., None]
        return {
            "topk_logits": values.where(is_token, 0.0),
            "topk_indices": indices.where(is_token, 0),
        }

    @property
    def _is_token(self) -> torch.Tensor:
        rows = self.micro_batch.rows
        columns = torch.arange(rows["input_ids"].shape[1], device=self.raw.device)
        return columns < rows["input_lengths"][:, None]
