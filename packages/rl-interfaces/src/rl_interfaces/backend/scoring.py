"""Scores of rows, gathered micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rl_batched_data.batched_data_dict import BatchedDataDict

from rl_interfaces.backend.steps import Span


class RowScores:
    """The scores of all rows of a batch, on the CPU; what no micro-batch gives is 0.

    Args:
        data: The rows.
    """

    def __init__(self, data: BatchedDataDict[Any]) -> None:
        self._shape = data["input_ids"].shape
        self.scores: dict[str, torch.Tensor] = {}

    def put(self, span: Span, values: Mapping[str, torch.Tensor]) -> None:
        """Take the scores of the rows `span`, of which there may be more than it has.

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
