"""Token log-probabilities, shared by training and scoring so that the two agree."""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypedDict, Unpack, cast

import torch
import torch.distributed as dist

from rl_batched_data.fused_logprobs import fused_scores
from rl_batched_data.logprobs_kernel import LogitTransform, ScoringTask, VocabScores


class ScoringOptions(TypedDict, total=False):
    """How logits are computed, transformed and tiled. Every key is optional."""

    output_matrix: torch.Tensor | None
    """`[vocab, hidden]`, in the dtype of the hidden states. With it, the inputs are hidden states,
    and the full logits are never materialised; without it, the inputs are logits."""
    output_bias: torch.Tensor | None
    """`[vocab]`, added to the logits of an `output_matrix`."""
    temperature: float
    """Divides the logits after scaling and soft cap; default 1."""
    logit_scale: float
    """The model's factor on its logits (Cohere; 1 / `logits_scaling` for Granite); default 1."""
    soft_cap: float | None
    """The model's soft cap (Gemma 2): `soft_cap * tanh(logits / soft_cap)`; none when absent."""
    tp_group: dist.ProcessGroup | None
    """Group over which the vocabulary is sharded; logits or matrix are this rank's shard."""
    vocab_start: int | None
    """First token id of this rank's shard; default rank times shard size."""
    chunk_logits: int
    """Logits per tile, at about 8 bytes each; more is faster; default 2 ** 24."""
    fused: bool
    """Have Liger compute them (extra `liger`), from an `output_matrix` without bias, soft cap or
    top-k, whose shards are equally large; default False. A token outside the vocabulary raises."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenScores:
    """Log-probabilities of target tokens, and statistics of their distributions."""

    logprobs: torch.Tensor
    """`[batch, seq]` float32: log-probabilities; NaN for a token outside the vocabulary."""
    normalizer: torch.Tensor | None
    """`[batch, seq]` float32: log-sum-exp of the logits, without gradient; None if fused."""
    entropy: torch.Tensor | None
    """`[batch, seq]` float32, in nats; None unless requested."""
    top_k_logits: torch.Tensor | None
    """`[batch, seq, k]` float32, largest first, without gradient; None unless requested. Minus the
    normalizer, they are log-probabilities."""
    top_k_indices: torch.Tensor | None
    """`[batch, seq, k]` int64: their token ids, in the full vocabulary."""


def token_logprobs(
    inputs: torch.Tensor, tokens: torch.Tensor, **options: Unpack[ScoringOptions]
) -> torch.Tensor:
    """Return the log-probability of each token given the tokens before it.

    Example, a row of three tokens:
        tokens = [[5, 6, 7]] -> [[0, log p(6 | 5), log p(7 | 5, 6)]]

    Args:
        inputs: Logits `[batch, seq, vocab]`, or, with `output_matrix`, hidden states
            `[batch, seq, hidden]`; any float. Position `t` scores token `t + 1`.
        tokens: `[batch, seq]` int64, right-padded; results at padding are undefined.
        options: See `ScoringOptions`.

    Returns:
        `[batch, seq]` float32, the same on every rank of `tp_group`; column 0 is zero, as no
        position scores the first token.

    Raises:
        ValueError: A number is out of range, or shapes or dtypes do not match.
    """
    return token_scores(inputs, tokens, **options).logprobs


def token_scores(
    inputs: torch.Tensor,
    tokens: torch.Tensor,
    *,
    entropy: bool = False,
    top_k: int = 0,
    **options: Unpack[ScoringOptions],
) -> TokenScores:
    """Return log-probabilities, normalizers, entropies and top-k; position `t` scores token `t`.

    Args:
        inputs: As in `token_logprobs`.
        tokens: As in `token_logprobs`.
        entropy: Whether to return the entropy, which is differentiable.
        top_k: Number of largest logits to return.
        options: See `ScoringOptions`.

    Raises:
        ValueError: As in `token_logprobs`.
    """
    if tokens.ndim != 2:
        raise ValueError(f"tokens have shape {list(tokens.shape)}, expected [batch, seq]")
    # The last position of a row predicts past its end: it scores the first token and is dropped.
    aligned = target_scores(
        inputs, tokens.roll(-1, dims=1), entropy=entropy, top_k=top_k, **options
    )
    values: dict[str, torch.Tensor | None] = {
        field.name: getattr(aligned, field.name) for field in fields(aligned)
    }
    return replace(
        aligned, **{name: _shift(each) for name, each in values.items() if each is not None}
    )


def target_scores(
    inputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    entropy: bool = False,
    top_k: int = 0,
    **options: Unpack[ScoringOptions],
) -> TokenScores:
    """Return the scores of `targets`, each under the logits at its own position, unshifted.

    For sequences sharded over context-parallel ranks, where the next token may be on another rank.

    Args:
        inputs: `[..., vocab]`, or `[..., hidden]` with `output_matrix`.
        targets: `[...]` int64.
        entropy: As in `token_scores`.
        top_k: As in `token_scores`.
        options: See `ScoringOptions`.

    Raises:
        ValueError: As in `token_logprobs`; or with `fused`, what Liger does not support.
        ImportError: With `fused`, Liger is not installed.
    """
    matrix, bias = options.get("output_matrix"), options.get("output_bias")
    _check(inputs, targets, matrix, bias)
    task = _task(inputs if matrix is None else matrix, matrix is None, entropy, top_k, options)
    # Liger refuses an empty batch, whose scores are empty either way.
    if options.get("fused", False) and targets.numel():
        flat = inputs.flatten(0, -2), matrix, bias, targets.flatten()
        logprobs, entropies = fused_scores(*flat, task)
        return TokenScores(
            logprobs=logprobs.view(targets.shape),
            normalizer=None,
            entropy=None if entropies is None else entropies.view(targets.shape),
            top_k_logits=None,
            top_k_indices=None,
        )
    logprobs, normalizer, entropies, top_logits, top_indices = cast(
        tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        VocabScores.apply(inputs.flatten(0, -2), matrix, bias, targets.flatten(), task),
    )
    shape = targets.shape
    return TokenScores(
        logprobs=logprobs.view(shape),
        normalizer=normalizer.view(shape),
        entropy=entropies.view(shape) if entropy else None,
        top_k_logits=top_logits.view(*shape, top_k) if top_k else None,
        top_k_indices=top_indices.view(*shape, top_k) if top_k else None,
    )


def _shift(values: torch.Tensor) -> torch.Tensor:
    """Shift every row one position to the right, and fill with zero."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)


def _task(
    vocab_source: torch.Tensor,
    is_logits: bool,
    entropy: bool,
    top_k: int,
    options: ScoringOptions,
) -> ScoringTask:
    vocab_size = vocab_source.shape[-1 if is_logits else 0]
    group, start = options.get("tp_group"), options.get("vocab_start")
    if start is None:
        start = 0 if group is None else dist.get_rank(group) * vocab_size
    return ScoringTask(
        transform=LogitTransform(
            scale=options.get("logit_scale", 1.0),
            soft_cap=options.get("soft_cap"),
            temperature=options.get("temperature", 1.0),
        ),
        vocab_size=vocab_size,
        vocab_start=start,
        tp_group=group,
        with_entropy=entropy,
        top_k=top_k,
        chunk_logits=options.get("chunk_logits", 2**24),
    )


def _check(
    inputs: torch.Tensor,
    targets: torch.Tensor,
    matrix: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    if inputs.shape[:-1] != targets.shape:
        raise ValueError(
            f"inputs {list(inputs.shape)} and tokens {list(targets.shape)} do not match"
        )
    if matrix is None and bias is not None:
        raise ValueError("output_bias is given without output_matrix")
    if matrix is None:
        return
    if inputs.shape[-1] != matrix.shape[-1] or inputs.dtype != matrix.dtype:
        raise ValueError(
            f"hidden states {inputs.dtype} {list(inputs.shape)} and output_matrix {matrix.dtype} "
            f"{list(matrix.shape)} do not match"
        )
    if bias is not None and bias.shape != matrix.shape[:1]:
        raise ValueError(
            f"output_bias {list(bias.shape)} and output_matrix {list(matrix.shape)} do not match"
        )
