"""One forward for training, old and reference log-probabilities, so that they cannot differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from rl_batched_data.token_logprobs import token_logprobs
from rl_interfaces import LossInput

from rl_dtensor_worker.packed_attention import AttentionRows, use_packed_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_batched_data import BatchedDataDict, PackedSequences
    from torch import nn

    from rl_dtensor_worker.microbatches import MicroBatch, Step


def forward_padded(
    model: nn.Module, input_ids: torch.Tensor, *, width_multiple: int
) -> torch.Tensor:
    """Return the logits `[batch, seq, vocab]` of right-padded rows, in the compute dtype.

    Attention is causal and padding lies on the right, so that no real token sees it: no mask is
    needed, and attention takes its fastest path. The width is completed to `width_multiple` inside.
    """
    width = input_ids.shape[1]
    padded = F.pad(input_ids, (0, -width % width_multiple))
    return model(input_ids=padded, use_cache=False).logits[:, :width]


def forward_packed(
    model: nn.Module, input_ids: torch.Tensor, packed: PackedSequences
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows' tokens `[1, total]`, concatenated, and their logits `[1, total, vocab]`.

    With an attention that is not ours, transformers tells sequences apart by where `position_ids`
    restart, provided that there is neither a mask nor a cache.
    """
    tokens = packed.pack(input_ids)
    arguments: dict[str, Any] = {"attention_mask": None}
    if use_packed_attention(model):
        # A mask that is given with four axes is passed on as it is: none is made of all tokens.
        unread = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
        arguments = {"attention_mask": unread, "attention_rows": AttentionRows.of(packed)}
    output = model(input_ids=tokens, position_ids=packed.position_ids, use_cache=False, **arguments)
    return tokens, output.logits


def forward_logprobs(
    model: nn.Module, micro_batch: MicroBatch, *, temperature: float, width_multiple: int
) -> torch.Tensor:
    """Return the log-probability of each token, `[batch, seq]` float32; 0 at 0 and at padding."""
    input_ids, lengths = micro_batch.rows["input_ids"], micro_batch.rows["input_lengths"]
    if micro_batch.packed is not None:
        tokens, logits = forward_packed(model, input_ids, micro_batch.packed)
        logprobs = token_logprobs(logits, tokens, temperature=temperature)
        return micro_batch.packed.unpack(logprobs, skip_first=True)
    width = input_ids.shape[1]
    longest = micro_batch.width or min(int(lengths.max()), width)
    tokens = input_ids[:, :longest]
    logits = forward_padded(model, tokens, width_multiple=width_multiple)
    logprobs = token_logprobs(logits, tokens, temperature=temperature)
    is_token = torch.arange(longest, device=tokens.device) < lengths[:, None]
    return F.pad(torch.where(is_token, logprobs, 0.0), (0, width - longest))


def score_rows(
    model: nn.Module,
    data: BatchedDataDict[Any],
    *,
    steps: Sequence[Step],
    temperature: float,
    width_multiple: int,
    device: torch.device,
) -> torch.Tensor:
    """Return the log-probabilities of all rows of `data`, `[batch, seq]` float32 on the CPU."""
    scores = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
    for micro_batch in (micro for step in steps for micro in step.micro_batches(device)):
        logprobs = forward_logprobs(
            model, micro_batch, temperature=temperature, width_multiple=width_multiple
        )
        start, end = micro_batch.span
        width = min(logprobs.shape[1], scores.shape[1])
        scores[start:end, :width] = logprobs[: end - start, :width].cpu()
    return scores


def forward_for_loss(
    model: nn.Module,
    micro_batch: MicroBatch,
    loss_fn: Any,
    *,
    temperature: float,
    width_multiple: int,
) -> torch.Tensor:
    """Return what `loss_fn` asks for: logits, temperature applied, or token log-probabilities."""
    if getattr(loss_fn, "input_type", LossInput.LOGITS) is LossInput.LOGPROBS:
        return forward_logprobs(
            model, micro_batch, temperature=temperature, width_multiple=width_multiple
        )
    input_ids = micro_batch.rows["input_ids"]
    if micro_batch.packed is not None:
        _, packed_logits = forward_packed(model, input_ids, micro_batch.packed)
        logits = micro_batch.packed.unpack(packed_logits)
    else:
        logits = forward_padded(model, input_ids, width_multiple=width_multiple)
    return logits.float() / temperature
