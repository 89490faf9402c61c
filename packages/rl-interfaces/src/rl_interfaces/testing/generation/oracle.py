"""Prompts, and reference results of a plain model: argmax, distributions, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rl_interfaces.testing.generation import GenerationCase

Columns = MutableMapping[str, torch.Tensor]
"""A batch of prompts, or the output of `generate`."""
ERROR_PROBABILITY = 1e-6
"""Probability that a correct backend fails one statistical check."""
NUM_NEW = 6
PROMPT_LENGTHS = (3, 1, 5, 2, 4)
_FEWEST_EXPECTED = 5.0
"""Cells of Pearson's test with a lower expected count are merged into one."""


def prompts(case: GenerationCase, lengths: Sequence[int] = PROMPT_LENGTHS) -> list[list[int]]:
    """Return random prompts without padding or end tokens, the same every time."""
    generator = torch.Generator().manual_seed(11)
    kept = [t for t in range(case.vocab_size) if t not in (case.pad_token_id, case.end_token_id)]
    picks = [torch.randint(len(kept), (length,), generator=generator) for length in lengths]
    return [[kept[index] for index in pick.tolist()] for pick in picks]


def batch_of(
    case: GenerationCase, rows: Sequence[Sequence[int]], *, spare: int = 1, **columns: object
) -> Columns:
    """Return a right-padded batch, by `spare` tokens wider than its longest row."""
    width = max(map(len, rows)) + spare
    input_ids = torch.full((len(rows), width), case.pad_token_id, dtype=torch.int64)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return case.batch(input_ids=input_ids, input_lengths=lengths, **columns)


def complete(
    case: GenerationCase,
    rows: Sequence[Sequence[int]],
    *,
    greedy: bool = False,
    columns: Mapping[str, Any] | None = None,
    **sampling: object,
) -> Columns:
    """Return the output for some prompts, with `NUM_NEW` tokens unless said otherwise."""
    backend = case.backend(**{"max_new_tokens": NUM_NEW, **sampling})
    return backend.generate(batch_of(case, rows, **(columns or {})), greedy=greedy)


def completions_of(output: Columns) -> list[list[int]]:
    """Return the generated tokens of each row."""
    ends, counts = output["unpadded_sequence_lengths"], output["generation_lengths"]
    return [
        row[int(end) - int(count) : int(end)].tolist()
        for row, end, count in zip(output["output_ids"], ends, counts, strict=True)
    ]


def greedy_completion(
    case: GenerationCase, prompt: Sequence[int], num_tokens: int = NUM_NEW
) -> list[int]:
    """Return the most likely continuation, a full forward per token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(int(case.logits(torch.tensor(tokens))[-1].argmax()))
        if tokens[-1] == case.end_token_id:
            break
    return tokens[len(prompt) :]


def distribution(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> torch.Tensor:
    """Return probabilities `[..., vocab]` in float64: tempered, then top k, then the nucleus."""
    logits = logits.double() / temperature
    if top_k is not None:
        smallest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    probabilities, order = logits.softmax(-1).sort(dim=-1, descending=True)
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    kept = probabilities.masked_fill(outside, 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def largest_error(case: GenerationCase, output: Columns, **sampling: Any) -> float:
    """Return the largest error of the log-probabilities of all generated tokens."""
    assert int(output["generation_lengths"].sum()) > 0, "nothing was generated"
    errors: list[torch.Tensor] = []
    ends, counts = output["unpadded_sequence_lengths"], output["generation_lengths"]
    for row, tokens in enumerate(output["output_ids"]):
        end, start = int(ends[row]), int(ends[row] - counts[row])
        logits = case.logits(tokens[: end - 1])[start - 1 :]
        chosen = distribution(logits, **sampling).gather(-1, tokens[start:end, None])
        errors.append(output["logprobs"][row, start:end].double() - chosen[:, 0].log())
    return float(torch.cat(errors).abs().max())


def chance_of(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the probability of counts at least as far from expected, by Pearson's test.

    Args:
        counts: `[cells]`, how often each came.
        probabilities: `[cells]` float64, how likely each is.
    """
    if bool((counts[probabilities == 0] > 0).any()):
        return 0.0
    expected = probabilities * counts.sum()
    rare = expected < _FEWEST_EXPECTED
    seen = torch.cat([counts[~rare].double(), counts[rare].sum().double()[None]])
    due = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen, due = seen[due > 0], due[due > 0]
    assert len(due) > 1, "a single cell: the check proves nothing"
    statistic = ((seen - due) ** 2 / due).sum()
    freedom = torch.tensor((len(due) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def error_of(call: Callable[[], object]) -> Exception | None:
    """Return what `call` raises, None if nothing."""
    try:
        call()
    except Exception as error:
        return error
    return None
