"""Counts that losses are divided by, and the report of a `train` call."""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rl_batched_data import BatchedDataDict


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCounts:
    """The samples and tokens that count in one global batch, over all data-parallel ranks."""

    valid_seqs: torch.Tensor
    """0-d float32: sum of `sample_mask`."""
    valid_toks: torch.Tensor
    """0-d float32: sum of `token_mask[:, 1:] * sample_mask[:, None]`."""

    @classmethod
    def of(
        cls, rows: BatchedDataDict[Any], *, group: dist.ProcessGroup, device: torch.device
    ) -> LossCounts:
        """Return the counts of a global batch, of which `rows` is this rank's share. Collective.

        Args:
            rows: `sample_mask`, and `token_mask` or `input_ids`.
            group: The data-parallel ranks.
            device: Where the group's tensors lie.
        """
        sample_mask = rows["sample_mask"].float()
        if "token_mask" in rows:
            num_tokens = (rows["token_mask"][:, 1:].float() * sample_mask[:, None]).sum()
        else:
            num_tokens = sample_mask.sum() * (rows["input_ids"].shape[1] - 1)
        counts = torch.stack([sample_mask.sum(), num_tokens]).to(device)
        dist.all_reduce(counts, group=group)
        return cls(valid_seqs=counts[0], valid_toks=counts[1])

    @property
    def divisors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What to hand to a loss: a batch in which nothing is valid has loss 0, not 0 / 0."""
        return self.valid_seqs.clamp(min=1), self.valid_toks.clamp(min=1)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is valid."""
        return float(self.valid_seqs) == 0 or float(self.valid_toks) == 0


@dataclass(kw_only=True, slots=True)
class TrainReport:
    """What the steps of one `train` call have given, the same on all ranks that hold one shard."""

    losses: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Per step, 0-d float32: the loss over all data-parallel ranks."""
    grad_norms: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Per step, 0-d float32, before clipping."""
    metrics: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """Per micro-batch of this rank that has a valid sample."""

    def add_metrics(self, found: Mapping[str, Any]) -> None:
        """Append the metrics of one micro-batch."""
        for name, value in found.items():
            self.metrics[name].append(value)
