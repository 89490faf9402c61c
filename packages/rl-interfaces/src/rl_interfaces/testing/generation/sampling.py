"""Rules on sampling: the distribution that tokens are drawn from, and what ends a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.testing.generation import DecodesText
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
_FEWEST = 4
"""Fewest tokens of a completion in which a stop can be placed."""
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
    """By Pearson's test, see `oracle.ERROR_PROBABILITY`."""
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


def a_configured_stop_token_ends_a_row_and_is_part_of_it(case: GenerationCase) -> None:
    """In every row that has it."""
    rows = prompts(case)
    free = completions_of(complete(case, rows, greedy=True))
    stop = free[_long_row(free)][2]
    found = completions_of(complete(case, rows, greedy=True, stop_token_ids=[stop]))
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert found == expected, f"with the stop token {stop}: {found}, not {expected}"
    assert found != free, "no row is shorter: nothing is shown"


def a_configured_stop_string_ends_a_row_and_is_part_of_it(case: GenerationCase) -> None:
    """Also where it spans tokens."""
    rows = prompts(case)
    free = completions_of(complete(case, rows, greedy=True))
    stop = _text(case, free[_long_row(free)][1:3])
    found = completions_of(complete(case, rows, greedy=True, stop_strings=[stop]))
    expected = [_until(case, row, stop) for row in free]
    assert found == expected, f"with the stop string {stop!r}: {found}, not {expected}"
    assert found != free, "no row is shorter: nothing is shown"


def a_stop_string_of_a_row_ends_that_row_alone(case: GenerationCase) -> None:
    """A row without any is not stopped by another's."""
    rows = prompts(case)
    long = _long_row(completions_of(complete(case, rows, greedy=True)))
    rows = [rows[long], rows[long]]  # the same prompt, so that both could be stopped
    free = completions_of(complete(case, rows, greedy=True))
    stop = _text(case, free[1][1:3])
    columns = {"stop_strings": [None, [stop]]}
    found = completions_of(complete(case, rows, greedy=True, columns=columns))
    expected = [free[0], _until(case, free[1], stop)]
    assert found == expected, f"with {stop!r} for row 1: {found}, not {expected}"
    assert expected[1] != free[1], "the row is no shorter: nothing is shown"


def _long_row(rows: list[list[int]]) -> int:
    longest = max(range(len(rows)), key=lambda index: len(rows[index]))
    assert len(rows[longest]) >= _FEWEST, f"the model ends every row at once: {rows}"
    return longest


def _text(case: GenerationCase, tokens: list[int]) -> str:
    assert isinstance(case, DecodesText)
    text = case.decode(tokens)
    assert text, f"the tokens {tokens} have no text"
    return text


def _until(case: GenerationCase, tokens: list[int], stop: str) -> list[int]:
    """Return the tokens up to the one with which the text has `stop`."""
    for end in range(1, len(tokens) + 1):
        if stop in _text(case, tokens[:end]):
            return tokens[:end]
    return tokens
