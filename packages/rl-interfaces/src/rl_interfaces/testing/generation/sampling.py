"""Rules of a generation backend: which distribution tokens come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.testing.generation.oracle import (
    ERROR_PROBABILITY,
    chance_of,
    complete,
    completions_of,
    distribution,
    largest_error,
    prompts,
)

if TYPE_CHECKING:
    from rl_interfaces.testing.generation import GenerationCase

TRUNCATIONS: tuple[dict[str, Any], ...] = (
    {"top_k": 3},
    {"top_p": 0.6},
    {"top_k": 8, "top_p": 0.5},
)
_UNLIKE = 10
"""Another distribution's log-probabilities are off by more than so many tolerances."""


def logprobs_are_those_of_the_tempered_distribution(case: GenerationCase) -> None:
    """Of the sampled tokens, where the temperature divides the logits."""
    _require_logprobs(case, {"temperature": 0.7}, {})


def logprobs_are_those_of_the_truncated_distribution(case: GenerationCase) -> None:
    """By top-k, by the nucleus, and by both: they are of what is left, which adds up to 1."""
    for truncation in TRUNCATIONS:
        tempered = {"temperature": 0.8}
        _require_logprobs(case, tempered | truncation, tempered)


def tokens_follow_the_tempered_distribution(case: GenerationCase) -> None:
    """By Pearson's test, see `generation_oracle.ERROR_PROBABILITY`."""
    _require_samples(case, {"temperature": 0.6}, {})


def tokens_follow_the_top_k_alone(case: GenerationCase) -> None:
    """By Pearson's test over the tokens that are left; no other comes."""
    _require_samples(case, {"top_k": 4}, {})


def tokens_follow_the_nucleus_alone(case: GenerationCase) -> None:
    """By Pearson's test over the tokens that are left; no other comes."""
    _require_samples(case, {"top_p": 0.7}, {})


def every_call_samples_anew(case: GenerationCase) -> None:
    """Two calls, and rows of one call, with the same prompt."""
    prompt = max(prompts(case), key=len)
    backend = case.backend(max_new_tokens=6, temperature=1.0)
    rows: list[list[int]] = []
    for _ in range(2):
        batch = case.batch(
            input_ids=torch.tensor([prompt] * 8), input_lengths=torch.tensor([len(prompt)] * 8)
        )
        rows.append(completions_of(backend.generate(batch)))  # type: ignore[arg-type]
    assert rows[0] != rows[1], "the second call repeats the first"
    assert any(row != rows[0][0] for row in rows[0]), "all rows of a call are the same"


def _require_logprobs(
    case: GenerationCase, sampling: dict[str, Any], other: dict[str, Any]
) -> None:
    output = complete(case, prompts(case) * 2, **sampling)
    error = largest_error(case, output, **sampling)
    assert error <= case.tolerance, f"{sampling}: the log-probabilities are off by {error:.2g}"
    wrong = largest_error(case, output, **other)
    assert wrong > _UNLIKE * case.tolerance, f"{sampling} changes nothing: nothing is shown"


def _require_samples(case: GenerationCase, sampling: dict[str, Any], other: dict[str, Any]) -> None:
    """Fail where one token after a prompt comes from another distribution than that of `sampling`.

    First it is shown that samples of the `other` distribution would fail.
    """
    prompt = max(prompts(case), key=len)
    logits = case.logits(torch.tensor(prompt))[-1]
    wanted, unwanted = distribution(logits, **sampling), distribution(logits, **other)
    told = f"{sampling} changes too little for {case.num_samples} samples: nothing is shown"
    assert chance_of(unwanted * case.num_samples, wanted) < ERROR_PROBABILITY, told
    output = complete(case, [prompt] * case.num_samples, max_new_tokens=1, **sampling)
    tokens = torch.tensor([row[0] for row in completions_of(output)])
    counts = torch.bincount(tokens, minlength=len(wanted))
    chance = chance_of(counts, wanted)
    assert chance >= ERROR_PROBABILITY, (
        f"{sampling}: such samples have a chance of {chance:.2g}: "
        f"{counts.tolist()} where {(wanted * case.num_samples).round().int().tolist()} were due"
    )
