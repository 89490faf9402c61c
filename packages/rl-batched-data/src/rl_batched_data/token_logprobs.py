"""Log-probabilities of tokens, the one place where they come from.

Shapes: `N` positions, `V` this rank's part of the vocabulary.
"""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    chunk_logits: int = 2**24,
) -> torch.Tensor:
    """Return the log-probability of each token given those before it.

    Example, a row of three tokens:
        tokens = [[5, 6, 7]] -> [[0, log p(6 | 5), log p(7 | 5, 6)]]

    Args:
        logits: `[batch, seq, vocab]`, any float; position `t` scores token `t + 1`. With
            `tp_group`, `[batch, seq, vocab / ranks]`, the shards in rank order.
        tokens: `[batch, seq]` int64, right-padded; what padding scores is meaningless, not zero.
        temperature: Divides the logits.
        tp_group: The ranks that share the vocabulary. Every rank gets the same result.
        chunk_logits: Logits handled at once: more is faster, and takes 4 bytes of memory each.

    Returns:
        `[batch, seq]` float32; column 0 is zero, as no position scores the first token.

    Raises:
        ValueError: `temperature` is not positive, or the shapes do not match.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be greater than 0")
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logits {list(logits.shape)} and tokens {list(tokens.shape)} do not match"
        )
    # The last position of a row scores nothing: it is given the row's first token, then dropped.
    targets = tokens.roll(-1, dims=1).flatten()
    flat_logits = logits.flatten(0, 1)
    scores = cast(
        torch.Tensor,
        _TargetLogprobs.apply(flat_logits, targets, temperature, tp_group, chunk_logits),
    )
    return torch.nn.functional.pad(scores.view(tokens.shape)[:, :-1], (1, 0))


class _TargetLogprobs(torch.autograd.Function):
    """Keeps the logits alone and recomputes the softmax chunk by chunk in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        tp_group: dist.ProcessGroup | None,
        chunk_logits: int,
    ) -> torch.Tensor:
        num_positions, vocab_size = logits_NV.shape
        local_N, is_local_N = _local_targets(targets_N, vocab_size, tp_group)
        chosen_N = logits_NV.gather(1, local_N[:, None]).squeeze(1).float() / temperature
        chosen_N = chosen_N * is_local_N
        normaliser_N = chosen_N.new_empty(num_positions)
        chunks = _chunks(num_positions, max(1, chunk_logits // vocab_size))
        for chunk in chunks:
            normaliser_N[chunk] = torch.logsumexp(logits_NV[chunk].float() / temperature, dim=1)
        if tp_group is not None:
            normaliser_N = _logsumexp_over_ranks(normaliser_N, tp_group)
            dist.all_reduce(chosen_N, group=tp_group)
        ctx.save_for_backward(logits_NV, local_N, is_local_N, normaliser_N)
        ctx.temperature = temperature
        ctx.chunks = chunks
        return chosen_N - normaliser_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits_NV, local_N, is_local_N, normaliser_N = ctx.saved_tensors
        scale_N = grads[0].float() / ctx.temperature
        grad_NV = torch.empty_like(logits_NV)
        for chunk in ctx.chunks:
            share = logits_NV[chunk].to(torch.float32, copy=True).div_(ctx.temperature)
            share.sub_(normaliser_N[chunk, None]).exp_().mul_(-scale_N[chunk, None])
            hit = (scale_N[chunk] * is_local_N[chunk])[:, None]
            grad_NV[chunk] = share.scatter_add_(1, local_N[chunk, None], hit)
        return grad_NV, None, None, None, None


def _local_targets(
    targets_N: torch.Tensor, vocab_size: int, tp_group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    start = 0 if tp_group is None else dist.get_rank(tp_group) * vocab_size
    local_N = targets_N - start
    is_local_N = (local_N >= 0) & (local_N < vocab_size)
    return local_N.clamp(0, vocab_size - 1), is_local_N


def _chunks(num_positions: int, step: int) -> list[slice]:
    return [slice(low, low + step) for low in range(0, num_positions, step)]


def _logsumexp_over_ranks(values_N: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    highest_N = values_N.clone()
    dist.all_reduce(highest_N, op=dist.ReduceOp.MAX, group=group)
    total_N = (values_N - highest_N).exp()
    dist.all_reduce(total_N, group=group)
    return highest_N + total_N.log()
