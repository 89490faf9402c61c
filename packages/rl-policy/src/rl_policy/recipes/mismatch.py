"""How far the log-probabilities of a sampler are from the trainer's, on the sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from rl_refit import VerificationError


def sampler_mismatch(
    batch: Mapping[str, torch.Tensor], trainer_logprobs: torch.Tensor
) -> dict[str, float]:
    """Return measures of one batch of samples; all but the first two are 1 and 0 at best.

    Args:
        batch: `generation_logprobs` and `token_mask`, `[batch, seq]`.
        trainer_logprobs: `[batch, seq]`, under the weights that were sampled from.

    Returns:
        `mismatch_mean_abs` and `mismatch_max_abs`: of the differences, in nats.
        `token_mult_prob_error`: mean of exp(|difference|), as NeMo RL reports it; 1 at best.
        `mismatch_kl`: KL(sampler || trainer) per token, k3 estimator (Schulman 2020).
    """
    sampled = batch["token_mask"].bool()
    difference = (trainer_logprobs - batch["generation_logprobs"])[sampled].double()
    if not len(difference):
        raise ValueError("'token_mask' marks no token: there is nothing to compare")
    return {
        "mismatch_mean_abs": float(difference.abs().mean()),
        "mismatch_max_abs": float(difference.abs().max()),
        "token_mult_prob_error": float(difference.abs().exp().mean()),
        "mismatch_kl": float((difference.exp() - 1 - difference).mean()),
    }


def check_mismatch(measured: Mapping[str, float], *, limit: float | None) -> None:
    """Raise where a refit has left the sampler with other weights than the trainer's.

    Args:
        measured: What `sampler_mismatch` returned.
        limit: Most nats that one token may be off. None: any.

    Raises:
        VerificationError: One is off by more.
    """
    worst = measured["mismatch_max_abs"]
    if limit is not None and not worst <= limit:
        raise VerificationError(
            f"the engines' log-probabilities are off by up to {worst:.3g} nats, more than "
            f"refit.max_mismatch={limit:g}: their weights are not the trainer's"
        )
