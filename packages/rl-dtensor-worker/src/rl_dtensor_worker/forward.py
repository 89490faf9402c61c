"""One forward for training, old and reference log-probabilities, so that they cannot differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from rl_batched_data.token_logprobs import token_logprobs
from rl_interfaces import LossInput

from rl_dtensor_worker.microbatches import Span, take_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_batched_data import BatchedDataDict
    from torch import nn


def forward_logits(
    model: nn.Module, input_ids: torch.Tensor, *, width_multiple: int
) -> torch.Tensor:
    """Return the logits `[batch, seq, vocab]` of right-padded rows, in the compute dtype.

    Attention is causal and padding lies on the right, so that no real token sees it: no mask is
    needed, and attention takes its fastest path. The width is completed to `width_multiple` inside.
    """
    width = input_ids.shape[1]
    padded = F.pad(input_ids, (0, -width % width_multiple))
    return model(input_ids=padded, use_cache=False).logits[:, :width]


def forward_logprobs(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    temperature: float,
    width_multiple: int,
) -> torch.Tensor:
    """Return the log-probability of each token, `[batch, seq]` float32; 0 at 0 and at padding.

    The forward is only as wide as the longest row.
    """
    input_ids, lengths = batch["input_ids"], batch["input_lengths"]
    width = input_ids.shape[1]
    longest = min(int(lengths.max()), width)
    tokens = input_ids[:, :longest]
    logits = forward_logits(model, tokens, width_multiple=width_multiple)
    logprobs = token_logprobs(logits, tokens, temperature=temperature)
    is_token = torch.arange(longest, device=tokens.device) < lengths[:, None]
    return F.pad(torch.where(is_token, logprobs, 0.0), (0, width - longest))


def score_rows(
    model: nn.Module,
    data: BatchedDataDict[Any],
    *,
    spans: Sequence[Span],
    temperature: float,
    width_multiple: int,
    device: torch.device,
) -> torch.Tensor:
    """Return the log-probabilities of all rows of `data`, `[batch, seq]` float32 on the CPU."""
    scores = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
    for span in spans:
        logprobs = forward_logprobs(
            model,
            take_rows(data, span, device=device),
            temperature=temperature,
            width_multiple=width_multiple,
        )
        start, end = span
        scores[start:end] = logprobs[: end - start].cpu()
    return scores


def forward_for_loss(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Any,
    *,
    temperature: float,
    width_multiple: int,
) -> torch.Tensor:
    """Return what `loss_fn` asks for: logits, temperature applied, or token log-probabilities."""
    if getattr(loss_fn, "input_type", LossInput.LOGITS) is LossInput.LOGPROBS:
        return forward_logprobs(
            model, batch, temperature=temperature, width_multiple=width_multiple
        )
    logits = forward_logits(model, batch["input_ids"], width_multiple=width_multiple)
    return logits.float() / temperature
