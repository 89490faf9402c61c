"""A batch on its way through vLLM: checked and seeded rows, requests, and the assembled output.

    GenerationDatumSpec --check_prompts, row_seeds--> on the driver, for all engines
                        --request_arguments--> one `SamplingParams` per row, in an engine
    Completion per row  --assemble_output--> GenerationOutputSpec

vLLM is not imported here.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces import NOT_SAMPLED, ROUTER_CHOOSES, FinishReason
from rl_interfaces.backend.end_tokens import num_token_ids
from rl_interfaces.backend.generation import check_room
from rl_interfaces.backend.steps import check_scoring_batch

if TYPE_CHECKING:
    from rl_interfaces import GenerationDatumSpec, GenerationOutputSpec
    from rl_interfaces.backend.generation import SamplingConfig
    from transformers import PreTrainedTokenizerBase

_LOGGER = logging.getLogger(__name__)
# vLLM's smallest bias of a logit, with which a probability is below 1e-40.
_NEVER = -100.0
_SEED_BYTES = 7  # of 8: an int64 without its sign bit


def check_prompts(
    data: BatchedDataDict[GenerationDatumSpec],
    *,
    max_length: int,
    vocab_size: int,
) -> None:
    """Raise unless an engine can continue every row of `data`, before anything is sent.

    Args:
        data: See `GenerationDatumSpec`.
        max_length: Most tokens per row, prompt and completion.
        vocab_size: Size of the model's vocabulary.

    Raises:
        ValueError: Names the key, the row and the numbers.
    """
    check_scoring_batch(data, vocab_size=vocab_size)
    if not data.size:
        raise ValueError("'input_ids' has no rows")
    limit = f"{max_length} tokens (generation.vllm_cfg.max_model_len, or the model's own)"
    check_room(data, longest=max_length, limit=limit)


def row_seeds(num_rows: int, *, seed: int, weight_version: int, call: int) -> torch.Tensor:
    """Return a seed per row, which does not depend on the number of engines.

    Args:
        num_rows: Rows of the batch.
        seed: The run's.
        weight_version: Of the weights that are sampled from, so that a resumed run does not repeat
            the seeds of its first steps.
        call: The number of earlier calls that sampled from these weights.

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
    unsampled: Sequence[int] = (),
    greedy: bool,
) -> list[dict[str, object]]:
    """Return the arguments of vLLM's `SamplingParams` for each row.

    Example, a prompt of 3 tokens in a row of at most 8, temperature 0.7:
        {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tokens": 5, "seed": 17, ...}

    Args:
        sampling: The configuration of all rows.
        prompt_lengths: Tokens per prompt, each less than `max_length`.
        seeds: Per row.
        stop_strings: Per row, in addition to the configured ones.
        max_length: Most tokens per row, prompt included.
        unsampled: Ids that are never sampled, as the tokenizer has no text for them.
        greedy: Take the most likely token, whatever `sampling` says.
    """
    shared = _distribution(sampling, greedy=greedy or sampling.temperature == 0) | {
        # 0 alternatives: the sampled token's log-probability alone.
        "logprobs": 0,
        "flat_logprobs": True,
        # The model's end tokens are among ours.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logit_bias": dict.fromkeys(unsampled, _NEVER) or None,
    }
    rows: list[dict[str, object]] = []
    for length, seed, texts in zip(prompt_lengths, seeds, stop_strings, strict=True):
        stops = [*sampling.stop_strings, *(texts or ())]
        row = {
            "max_tokens": min(sampling.max_new_tokens, max_length - length),
            "seed": seed,
            "stop": stops,
            # Stop strings are matched in text, which costs time without any.
            "detokenize": bool(stops),
        }
        rows.append(shared | row)
    return rows


def _distribution(sampling: SamplingConfig, *, greedy: bool) -> dict[str, object]:
    # Greedy rows report the untempered, untruncated distribution, as in every backend.
    if greedy:
        return {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
    }


def unsampled_ids(
    tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, engine_kwargs: Mapping[str, object]
) -> range:
    """Return the ids of a model that its tokenizer has no text for, see `request_arguments`.

    Args:
        tokenizer: The model's tokenizer.
        vocab_size: Ids that the model has logits for.
        engine_kwargs: Further arguments of vLLM's engine.
    """
    size = num_token_ids(tokenizer)
    if size is None or size >= vocab_size:
        return range(0)
    if engine_kwargs.get("speculative_config"):
        _LOGGER.warning(
            "The tokenizer has %d of the model's %d ids; with speculative decoding vLLM may sample "
            "the others, whose text is empty",
            size,
            vocab_size,
        )
        return range(0)
    return range(size, vocab_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """An engine's completion of one prompt."""

    token_ids: Sequence[int]
    """The generated tokens, including the one that ended the row."""
    logprobs: Sequence[float]
    """Of each token, under the distribution that it was sampled from."""
    weight_versions: Sequence[int]
    """Of the weights that each token was sampled from, in ascending order."""
    finish_reason: FinishReason
    """What ended it."""
    routed_experts: np.ndarray | None = None
    """`[tokens, layers, experts per token]` integers, of prompt and completion but for the last
    token, which the model has not taken; 0 in layers without experts. None: not asked for."""


def assemble_output(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    pad_token_id: int,
) -> BatchedDataDict[GenerationOutputSpec]:
    """Return a `GenerationOutputSpec` with the weight versions of each row and token.

    Example, prompts [1, 2] and [3], completions [4] and [5, 6], padding 0, the last token sampled
    from version 9 and the others from version 8:
        output_ids                = [[1, 2, 4], [3, 5, 6]]
        generation_lengths        = [1, 2]
        unpadded_sequence_lengths = [3, 3]
        logprobs                  = [[0, 0, -0.1], [0, -0.2, -0.3]]
        weight_version            = [8, 8]
        weight_versions           = [[-2, -2, 8], [-2, 8, 9]]

    A row's `weight_version` is the oldest of its tokens. `routed_experts` is there if a completion
    has routes.

    Args:
        prompts: The tokens of each row, without padding.
        completions: In the same order.
        pad_token_id: Pads `output_ids` on the right.
    """
    lengths = [
        len(prompt) + len(completion.token_ids)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    width = max(lengths, default=0)
    output_ids = torch.full((len(lengths), width), pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros((len(lengths), width), dtype=torch.float32)
    versions = torch.full((len(lengths), width), NOT_SAMPLED, dtype=torch.int64)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens = [*prompt, *completion.token_ids]
        output_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        logprobs[row, len(prompt) : len(tokens)] = torch.tensor(
            list(completion.logprobs), dtype=torch.float32
        )
        versions[row, len(prompt) : len(tokens)] = torch.tensor(completion.weight_versions)
    columns = {
        "output_ids": output_ids,
        "generation_lengths": torch.tensor(
            [len(completion.token_ids) for completion in completions], dtype=torch.int64
        ),
        "unpadded_sequence_lengths": torch.tensor(lengths, dtype=torch.int64),
        "logprobs": logprobs,
        "weight_version": torch.tensor(
            [completion.weight_versions[0] for completion in completions], dtype=torch.int64
        ),
        "weight_versions": versions,
    }
    if any(completion.routed_experts is not None for completion in completions):
        columns["routed_experts"] = _routes(completions, width)
    return BatchedDataDict(columns)


def _routes(completions: Sequence[Completion], width: int) -> torch.Tensor:
    """Return the experts of each token, `[rows, width, layers, experts per token]` int16."""
    given = [completion.routed_experts for completion in completions]
    shape = next(each.shape[1:] for each in given if each is not None)
    routes = torch.full((len(given), width, *shape), ROUTER_CHOOSES, dtype=torch.int16)
    for row, each in zip(routes, given, strict=True):
        if each is not None:
            row[: len(each)] = torch.from_numpy(each.astype(np.int16))
    return routes


def mean_staleness(generated: Mapping[str, torch.Tensor], weight_version: int) -> float:
    """Return how many versions behind the sampled tokens are, as a mean over tokens.

    Example, `weight_versions` [[-2, -2, 8], [-2, 8, 9]] at version 9: (1 + 1 + 0) / 3

    Args:
        generated: A `GenerationOutputSpec`. Samplers other than engines are never behind, and give
            no `weight_versions`: 0.0.
        weight_version: Of the weights that are updated with these tokens.
    """
    if "weight_versions" not in generated:
        return 0.0
    versions = generated["weight_versions"]
    sampled = versions[versions != NOT_SAMPLED]
    return float((weight_version - sampled).double().mean()) if len(sampled) else 0.0


def versions_of(spans: Sequence[Any]) -> list[int]:
    """Return a version per token of vLLM's spans."""
    return [int(span.version) for span in spans for _ in range(span.start, span.end)]
