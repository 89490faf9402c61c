"""From one completion per prompt to a padded batch. No vLLM here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rl_batched_data import BatchedDataDict


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine generated behind one prompt."""

    token_ids: Sequence[int]
    """The tokens, the one that ended the row included."""
    logprobs: Sequence[float]
    """Of each token, under the distribution that it was sampled from."""


def assemble_output(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    pad_token_id: int,
    weight_version: int,
) -> BatchedDataDict[Any]:
    """Return a `GenerationOutputSpec`, and the weights' version of each row.

    Example, prompts [1, 2] and [3] that got [4] and [5, 6], padding 0, version 9:
        output_ids                = [[1, 2, 4], [3, 5, 6]]
        generation_lengths        = [1, 2]
        unpadded_sequence_lengths = [3, 3]
        logprobs                  = [[0, 0, -0.1], [0, -0.2, -0.3]]
        weight_version            = [9, 9]

    Args:
        prompts: The tokens of each row, without padding.
        completions: In the same order.
        pad_token_id: Fills `output_ids` behind each row's end.
        weight_version: Of the weights that sampled, see `WeightReceiver.commit_update`.
    """
    lengths = [
        len(prompt) + len(completion.token_ids)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    width = max(lengths, default=0)
    output_ids = torch.full((len(lengths), width), pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros((len(lengths), width), dtype=torch.float32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens = [*prompt, *completion.token_ids]
        output_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        logprobs[row, len(prompt) : len(tokens)] = torch.tensor(
            list(completion.logprobs), dtype=torch.float32
        )
    return BatchedDataDict(
        {
            "output_ids": output_ids,
            "generation_lengths": torch.tensor(
                [len(completion.token_ids) for completion in completions], dtype=torch.int64
            ),
            "unpadded_sequence_lengths": torch.tensor(lengths, dtype=torch.int64),
            "logprobs": logprobs,
            "weight_version": torch.full((len(lengths),), weight_version, dtype=torch.int64),
        }
    )
