"""One sampled token per row, and its log-probability under the distribution it came from."""

from __future__ import annotations

import torch


def truncate_logits(logits: torch.Tensor, *, top_k: int | None, top_p: float) -> torch.Tensor:
    """Return `logits` with everything outside the top k, then outside the nucleus, at -inf.

    The nucleus is the smallest set of tokens whose probability reaches `top_p` (Holtzman et al.
    2020, "The Curious Case of Neural Text Degeneration"); the most likely token is always in it.

    Args:
        logits: `[rows, vocab]` float32, temperature applied.
        top_k: Tokens kept per row; ties with the last one are kept too. None keeps all.
        top_p: Probability to reach, in (0, 1]. 1.0 keeps all.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if top_p < 1.0:
        descending, order = logits.sort(dim=-1, descending=True)
        probabilities = descending.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(outside, float("-inf"))
    return logits


def sample_tokens(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token per row, int64 `[rows]`, and its log-probability, float32 `[rows]`.

    Args:
        logits: `[rows, vocab]`, any float.
        temperature: Divides the logits; 0 takes the most likely token, whose log-probability is
            then that under the untempered, untruncated distribution.
        top_k: See `truncate_logits`.
        top_p: See `truncate_logits`.
        generator: The source of randomness, on the logits' device.
    """
    logits = logits.float()
    if temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        logits = truncate_logits(logits / temperature, top_k=top_k, top_p=top_p)
        tokens = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)
    logprobs = logits.log_softmax(dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
    return tokens, logprobs
