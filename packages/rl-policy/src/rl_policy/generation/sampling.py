"""From a config and a batch to the arguments of one request per row. No vLLM here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from rl_interfaces.backend.batch_checks import check_scoring_batch

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict

    from rl_policy.generation.engine_config import SamplingConfig

_SEED_BYTES = 7  # of 8, so that the sign of an int64 is never touched


def check_prompts(
    data: BatchedDataDict[Any], *, pad_token_id: int | None, max_length: int, vocab_size: int
) -> None:
    """Raise unless an engine can continue every row of `data`, before anything is sent.

    Args:
        data: See `GenerationDatumSpec`.
        pad_token_id: The tokenizer's padding token, by which left padding is told.
        max_length: Most tokens per row, prompt and completion.
        vocab_size: Tokens that the model has.

    Raises:
        ValueError: Names the key, the row and the numbers.
    """
    check_scoring_batch(data, pad_token_id=pad_token_id)
    lengths = data["input_lengths"]
    if not len(lengths):
        raise ValueError("'input_ids' has no rows")
    row = int(lengths.argmax())
    if lengths[row] >= max_length:
        raise ValueError(
            f"'input_lengths'[{row}]={int(lengths[row])} leaves no room for a token in "
            f"{max_length} tokens (generation.vllm_cfg.max_model_len, or the model's own)"
        )
    highest = int(data["input_ids"].max())
    if highest >= vocab_size:
        raise ValueError(
            f"'input_ids' holds the token {highest}: the model has {vocab_size} tokens"
        )


def row_seeds(num_rows: int, *, seed: int, weight_version: int, call: int) -> torch.Tensor:
    """Return a seed per row, the same for the same numbers on however many engines.

    Args:
        num_rows: Rows of the batch.
        seed: Of the run.
        weight_version: The weights that the samples come from: a resumed run goes on with other
            samples than it began with.
        call: How often these weights have been sampled from before.

    Returns:
        `[num_rows]` int64, not negative.
    """
    prefix = f"{seed}/{weight_version}/{call}/"
    digests = (
        hashlib.blake2b(f"{prefix}{row}".encode(), digest_size=_SEED_BYTES).digest()
        for row in range(num_rows)
    )
    return torch.tensor([int.from_bytes(digest) for digest in digests], dtype=torch.int64)


def request_arguments(
    sampling: SamplingConfig,
    *,
    prompt_lengths: Sequence[int],
    seeds: Sequence[int],
    stop_strings: Sequence[Sequence[str] | None],
    max_length: int,
    greedy: bool,
) -> list[dict[str, Any]]:
    """Return the arguments of vLLM's `SamplingParams` for each row.

    Example, a row of 3 tokens that may grow to 8, sampled at 0.7:
        {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 5, "seed": 17, ...}

    Args:
        sampling: What holds for every row.
        prompt_lengths: Tokens per prompt, each less than `max_length`.
        seeds: Per row.
        stop_strings: Texts per row, besides the configured ones.
        max_length: Most tokens per row, prompt included.
        greedy: Take the most likely token, whatever `sampling` says.
    """
    shared = _distribution(sampling, greedy=greedy or sampling.temperature == 0) | {
        # 0 alternatives: the sampled token's log-probability alone.
        "logprobs": 0,
        "flat_logprobs": True,
        # The end token is among ours, and a model's own list of further ones is not the contract's.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    rows: list[dict[str, Any]] = []
    for length, seed, texts in zip(prompt_lengths, seeds, stop_strings, strict=True):
        stops = [*sampling.stop_strings, *(texts or ())]
        row = {
            "max_tokens": min(sampling.max_new_tokens, max_length - length),
            "seed": seed,
            "stop": stops,
            "detokenize": bool(stops),
        }
        rows.append(shared | row)
    return rows


def _distribution(sampling: SamplingConfig, *, greedy: bool) -> dict[str, Any]:
    # Greedy rows report the untempered, untruncated distribution, as every backend does.
    if greedy:
        return {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
    }
