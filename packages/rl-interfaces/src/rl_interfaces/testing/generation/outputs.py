"""Rules on requests and outputs: contract version, refused batches, shapes, greedy decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.contract import ContractVersionError, check_contract_version
from rl_interfaces.testing.generation.oracle import (
    NUM_NEW,
    PROMPT_LENGTHS,
    batch_of,
    complete,
    completions_of,
    error_of,
    greedy_completion,
    largest_error,
    prompts,
)

if TYPE_CHECKING:
    from rl_interfaces.testing.generation import GenerationCase

DTYPES = {
    "output_ids": torch.int64,
    "generation_lengths": torch.int64,
    "unpadded_sequence_lengths": torch.int64,
    "logprobs": torch.float32,
}


def the_contracts_version_is_declared(case: GenerationCase) -> None:
    """`contract_version` of the class is one that this version of the interfaces takes."""
    backend_class = type(case.backend(max_new_tokens=1))
    try:
        check_contract_version(backend_class, owner=backend_class.__module__)
    except ContractVersionError as error:
        raise AssertionError(str(error)) from error


def outputs_have_the_documented_keys_shapes_and_dtypes(case: GenerationCase) -> None:
    """On the CPU, as wide as the longest row needs, or wider."""
    output = complete(case, prompts(case))
    num_rows, width = output["output_ids"].shape
    shapes = dict.fromkeys(("output_ids", "logprobs"), (num_rows, width))
    for key, dtype in DTYPES.items():
        assert key in output, f"{key!r} is missing"
        column = output[key]
        shape = shapes.get(key, (num_rows,))
        assert tuple(column.shape) == shape, f"{key!r} has shape {list(column.shape)}, not {shape}"
        assert column.dtype == dtype, f"{key!r} is {column.dtype}, not {dtype}"
        assert column.device.type == "cpu", f"{key!r} is on {column.device}"
    assert num_rows == len(PROMPT_LENGTHS), f"{num_rows} rows for {len(PROMPT_LENGTHS)} prompts"
    longest = int(output["unpadded_sequence_lengths"].max())
    assert width >= longest, f"{width} columns do not hold a row of {longest}"


def a_row_is_its_prompt_its_completion_and_padding(case: GenerationCase) -> None:
    """For prompts of unlike lengths, completions right behind them."""
    rows = prompts(case)
    output = complete(case, rows)
    lengths, generated = output["unpadded_sequence_lengths"], output["generation_lengths"]
    total = [len(row) + int(count) for row, count in zip(rows, generated, strict=True)]
    assert lengths.tolist() == total, f"'unpadded_sequence_lengths' is {lengths}, not {total}"
    assert int(generated.min()) >= 1, f"a row got no token: {generated.tolist()}"
    for index, row in enumerate(rows):
        tokens = output["output_ids"][index].tolist()
        assert tokens[: len(row)] == row, f"row {index} does not begin with its prompt"
        padding = set(tokens[total[index] :])
        assert padding <= {case.pad_token_id}, f"row {index} is filled up with {padding}"
        completion = tokens[len(row) : total[index]]
        inside = all(0 <= token < case.vocab_size for token in completion)
        assert inside, f"row {index} has tokens that the model lacks: {completion}"


def logprobs_are_zero_but_for_the_completion(case: GenerationCase) -> None:
    """At every token of the prompt and of the padding."""
    rows = prompts(case)
    output = complete(case, rows)
    for index, row in enumerate(rows):
        logprobs, end = output["logprobs"][index], int(output["unpadded_sequence_lengths"][index])
        assert not logprobs[: len(row)].any(), f"row {index}: not zero in its prompt: {logprobs}"
        assert not logprobs[end:].any(), f"row {index}: not zero in its padding: {logprobs}"
        assert bool((logprobs[len(row) : end] < 0).any()), f"row {index}: no log-probabilities"


def greedy_is_the_argmax_of_the_oracle(case: GenerationCase) -> None:
    """By the argument and by a temperature of 0, whatever else is configured."""
    rows = prompts(case)
    expected = [greedy_completion(case, row) for row in rows]
    outputs = {
        "greedy=True": complete(case, rows, greedy=True, temperature=0.7, top_k=3),
        "temperature=0": complete(case, rows, temperature=0.0),
    }
    for how, output in outputs.items():
        found = completions_of(output)
        assert found == expected, f"{how}: {found} is not the argmax, {expected}"


def greedy_logprobs_are_those_of_the_whole_distribution(case: GenerationCase) -> None:
    """Neither tempered nor truncated: otherwise they would all be 0."""
    output = complete(case, prompts(case), greedy=True, temperature=0.5, top_k=2)
    error = largest_error(case, output)
    assert error <= case.tolerance, f"the log-probabilities are off by {error:.2g}"
    wrong = largest_error(case, output, temperature=0.5, top_k=2)
    assert wrong > 10 * case.tolerance, "tempered ones are the same: nothing is shown"


def rows_come_back_in_the_callers_order(case: GenerationCase) -> None:
    """Also if they come in another one."""
    rows = prompts(case)
    forward = complete(case, rows, greedy=True)["output_ids"]
    backward = complete(case, rows[::-1], greedy=True)["output_ids"]
    assert torch.equal(backward.flip(0), forward), "the rows of a batch change places"
    assert not torch.equal(forward.flip(0), forward), "all rows are the same: nothing is shown"


def no_row_gets_more_tokens_than_configured(case: GenerationCase) -> None:
    """Nor fewer, unless the end token came."""
    rows = prompts(case)
    for limit in (1, 3, NUM_NEW):
        for index, tokens in enumerate(completions_of(complete(case, rows, max_new_tokens=limit))):
            ended = tokens[-1:] == [case.end_token_id]
            told = f"row {index} got {len(tokens)} tokens with max_new_tokens={limit}"
            assert len(tokens) == limit or (ended and len(tokens) < limit), told


def the_batch_is_left_as_it_was(case: GenerationCase) -> None:
    """It may be memory that others read."""
    batch = batch_of(case, prompts(case))
    kept = {key: value.clone() for key, value in batch.items()}
    case.backend(max_new_tokens=NUM_NEW).generate(batch)
    assert batch.keys() == kept.keys(), f"the batch has the keys {sorted(batch)} now"
    for key, value in kept.items():
        assert torch.equal(batch[key], value), f"{key!r} of the batch was written into"


def a_batch_without_lengths_is_refused(case: GenerationCase) -> None:
    """The key is named."""
    batch = case.batch(input_ids=torch.tensor(prompts(case, (3, 3))))
    _require_refusal(case, batch, "input_lengths")


def a_length_beyond_the_width_is_refused(case: GenerationCase) -> None:
    """Key and number are named."""
    batch = batch_of(case, prompts(case))
    beyond = batch["input_ids"].shape[1] + 1
    batch["input_lengths"][2] = beyond
    _require_refusal(case, batch, "input_lengths", str(beyond))


def a_prompt_without_room_for_a_token_is_refused(case: GenerationCase) -> None:
    """Key, length and limit are named; a prompt with room for one token gets one."""
    fitting = batch_of(case, prompts(case, (2, case.max_length - 1)), spare=0)
    output: Any = case.backend(max_new_tokens=NUM_NEW).generate(fitting)
    assert int(output["generation_lengths"][1]) == 1, "a prompt with room for one token"
    full = batch_of(case, prompts(case, (2, case.max_length)), spare=0)
    _require_refusal(case, full, "input_lengths", str(case.max_length))


def a_batch_without_rows_is_refused(case: GenerationCase) -> None:
    """By the name of the key."""
    empty = case.batch(
        input_ids=torch.zeros((0, 4), dtype=torch.int64),
        input_lengths=torch.zeros(0, dtype=torch.int64),
    )
    _require_refusal(case, empty, "input_ids")


def _require_refusal(case: GenerationCase, batch: Any, *words: str) -> None:
    backend = case.backend(max_new_tokens=NUM_NEW)
    error = error_of(lambda: backend.generate(batch))
    assert isinstance(error, ValueError), f"the batch ended with {error!r}, not with a ValueError"
    for word in words:
        assert word in str(error), f"the error does not name {word}: {error}"
