"""Rules on a generation backend: outputs, sampling, refused batches, sleep, received weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.testing.generation import DecodesText, ReceivesWeights
from rl_interfaces.testing.generation.oracle import (
    ERROR_PROBABILITY,
    NUM_NEW,
    PROMPT_LENGTHS,
    Columns,
    batch_of,
    chance_of,
    complete,
    completions_of,
    distribution,
    error_of,
    greedy_completion,
    largest_error,
    prompts,
)
from rl_interfaces.worker import ContractVersionError, check_contract_version

if TYPE_CHECKING:
    from rl_interfaces.testing.generation import GenerationCase

DTYPES = {
    "output_ids": torch.int64,
    "generation_lengths": torch.int64,
    "unpadded_sequence_lengths": torch.int64,
    "logprobs": torch.float32,
}


def the_contracts_version_is_declared(case: GenerationCase) -> None:
    """`contract_version` of the class is compatible with this version of the interfaces."""
    backend_class = type(case.backend(max_new_tokens=1))
    try:
        check_contract_version(backend_class, owner=backend_class.__module__)
    except ContractVersionError as error:
        raise AssertionError(str(error)) from error


def outputs_have_the_documented_keys_shapes_and_dtypes(case: GenerationCase) -> None:
    """On the CPU, at least as wide as the longest row."""
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
    """For prompts of different lengths, each completion directly after its prompt."""
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
    """With `greedy=True` and with temperature 0, regardless of the other sampling keys."""
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
    """At temperature 1 and untruncated; otherwise all would be 0."""
    output = complete(case, prompts(case), greedy=True, temperature=0.5, top_k=2)
    error = largest_error(case, output)
    assert error <= case.tolerance, f"the log-probabilities are off by {error:.2g}"
    wrong = largest_error(case, output, temperature=0.5, top_k=2)
    assert wrong > 10 * case.tolerance, "tempered ones are the same: the check proves nothing"


def rows_come_back_in_the_callers_order(case: GenerationCase) -> None:
    """Also for reversed rows."""
    rows = prompts(case)
    forward = complete(case, rows, greedy=True)["output_ids"]
    backward = complete(case, rows[::-1], greedy=True)["output_ids"]
    assert torch.equal(backward.flip(0), forward), "the rows of a batch change places"
    assert not torch.equal(forward.flip(0), forward), "all rows are the same: this proves nothing"


def no_row_gets_more_tokens_than_configured(case: GenerationCase) -> None:
    """Exactly `max_new_tokens`, unless the end token ends the row."""
    rows = prompts(case)
    for limit in (1, 3, NUM_NEW):
        for index, tokens in enumerate(completions_of(complete(case, rows, max_new_tokens=limit))):
            ended = tokens[-1:] == [case.end_token_id]
            message = f"row {index} got {len(tokens)} tokens with max_new_tokens={limit}"
            assert len(tokens) == limit or (ended and len(tokens) < limit), message


def the_batch_is_left_as_it_was(case: GenerationCase) -> None:
    """The batch may be shared memory."""
    batch = batch_of(case, prompts(case))
    kept = {key: value.clone() for key, value in batch.items()}
    case.backend(max_new_tokens=NUM_NEW).generate(batch)
    assert batch.keys() == kept.keys(), f"the batch has the keys {sorted(batch)} now"
    for key, value in kept.items():
        assert torch.equal(batch[key], value), f"{key!r} of the batch was written into"


def a_batch_without_lengths_is_refused(case: GenerationCase) -> None:
    """The error names the key."""
    batch = case.batch(input_ids=torch.tensor(prompts(case, (3, 3))))
    _require_refusal(case, batch, "input_lengths")


def a_length_beyond_the_width_is_refused(case: GenerationCase) -> None:
    """The error names key and number."""
    batch = batch_of(case, prompts(case))
    beyond = batch["input_ids"].shape[1] + 1
    batch["input_lengths"][2] = beyond
    _require_refusal(case, batch, "input_lengths", str(beyond))


def a_prompt_without_room_for_a_token_is_refused(case: GenerationCase) -> None:
    """The error names key, length and limit; a prompt with room for one token gets one."""
    fitting = batch_of(case, prompts(case, (2, case.max_length - 1)), spare=0)
    output = case.backend(max_new_tokens=NUM_NEW).generate(fitting)
    assert int(output["generation_lengths"][1]) == 1, "a prompt with room for one token"
    full = batch_of(case, prompts(case, (2, case.max_length)), spare=0)
    _require_refusal(case, full, "input_lengths", str(case.max_length))


def a_batch_without_rows_is_refused(case: GenerationCase) -> None:
    """The error names the key."""
    empty = case.batch(
        input_ids=torch.zeros((0, 4), dtype=torch.int64),
        input_lengths=torch.zeros(0, dtype=torch.int64),
    )
    _require_refusal(case, empty, "input_ids")


def _require_refusal(case: GenerationCase, batch: Columns, *words: str) -> None:
    backend = case.backend(max_new_tokens=NUM_NEW)
    error = error_of(lambda: backend.generate(batch))
    assert isinstance(error, ValueError), f"the batch ended with {error!r}, not with a ValueError"
    for word in words:
        assert word in str(error), f"the error does not name {word}: {error}"


Sampling = dict[str, Any]
TRUNCATIONS: tuple[Sampling, ...] = (
    {"top_k": 3},
    {"top_p": 0.6},
    {"top_k": 8, "top_p": 0.5},
)
_FEWEST = 4
"""Minimum tokens of a completion with a stop in it."""
_UNLIKE = 10
"""Log-probabilities of another distribution differ by more than this many tolerances."""


def logprobs_are_those_of_the_tempered_distribution(case: GenerationCase) -> None:
    """With the logits divided by the temperature."""
    _require_logprobs(case, {"temperature": 0.7}, {})


def logprobs_are_those_of_the_truncated_distribution(case: GenerationCase) -> None:
    """Renormalised over the kept tokens, for top-k, the nucleus, and both."""
    for truncation in TRUNCATIONS:
        tempered = {"temperature": 0.8}
        _require_logprobs(case, tempered | truncation, tempered)


def tokens_follow_the_tempered_distribution(case: GenerationCase) -> None:
    """By Pearson's test, see `oracle.ERROR_PROBABILITY`."""
    _require_samples(case, {"temperature": 0.6}, {})


def tokens_follow_the_top_k_alone(case: GenerationCase) -> None:
    """By Pearson's test over the kept tokens; no other is sampled."""
    _require_samples(case, {"top_k": 4}, {})


def tokens_follow_the_nucleus_alone(case: GenerationCase) -> None:
    """By Pearson's test over the kept tokens; no other is sampled."""
    _require_samples(case, {"top_p": 0.7}, {})


def every_call_samples_anew(case: GenerationCase) -> None:
    """Two calls, and two rows of a call, with the same prompt have different samples."""
    prompt = max(prompts(case), key=len)
    backend = case.backend(max_new_tokens=6, temperature=1.0)
    rows: list[list[list[int]]] = []
    for _ in range(2):
        batch = case.batch(
            input_ids=torch.tensor([prompt] * 8), input_lengths=torch.tensor([len(prompt)] * 8)
        )
        rows.append(completions_of(backend.generate(batch)))
    assert rows[0] != rows[1], "the second call repeats the first"
    assert any(row != rows[0][0] for row in rows[0]), "all rows of a call are the same"


def _require_logprobs(case: GenerationCase, sampling: Sampling, other: Sampling) -> None:
    output = complete(case, prompts(case) * 2, **sampling)
    error = largest_error(case, output, **sampling)
    assert error <= case.tolerance, f"{sampling}: the log-probabilities are off by {error:.2g}"
    wrong = largest_error(case, output, **other)
    assert wrong > _UNLIKE * case.tolerance, f"{sampling} changes nothing: the check proves nothing"


def _require_samples(case: GenerationCase, sampling: Sampling, other: Sampling) -> None:
    """Fail if the first sampled token does not follow the distribution of `sampling`.

    First checks that samples of the distribution of `other` would fail.
    """
    prompt = max(prompts(case), key=len)
    logits = case.logits(torch.tensor(prompt))[-1]
    wanted, unwanted = distribution(logits, **sampling), distribution(logits, **other)
    message = f"{sampling} changes too little for {case.num_samples} samples: this proves nothing"
    assert chance_of(unwanted * case.num_samples, wanted) < ERROR_PROBABILITY, message
    output = complete(case, [prompt] * case.num_samples, max_new_tokens=1, **sampling)
    tokens = torch.tensor([row[0] for row in completions_of(output)])
    counts = torch.bincount(tokens, minlength=len(wanted))
    chance = chance_of(counts, wanted)
    assert chance >= ERROR_PROBABILITY, (
        f"{sampling}: such samples have a chance of {chance:.2g}: "
        f"{counts.tolist()} where {(wanted * case.num_samples).round().int().tolist()} were due"
    )


def a_configured_stop_token_ends_a_row_and_is_part_of_it(case: GenerationCase) -> None:
    """In every row that contains it."""
    rows = prompts(case)
    free = completions_of(complete(case, rows, greedy=True))
    stop = free[_long_row(free)][2]
    found = completions_of(complete(case, rows, greedy=True, stop_token_ids=[stop]))
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert found == expected, f"with the stop token {stop}: {found}, not {expected}"
    assert found != free, "no row is shorter: the check proves nothing"


def a_configured_stop_string_ends_a_row_and_is_part_of_it(case: GenerationCase) -> None:
    """Also where it spans tokens."""
    rows = prompts(case)
    free = completions_of(complete(case, rows, greedy=True))
    stop = _text(case, free[_long_row(free)][1:3])
    found = completions_of(complete(case, rows, greedy=True, stop_strings=[stop]))
    expected = [_until(case, row, stop) for row in free]
    assert found == expected, f"with the stop string {stop!r}: {found}, not {expected}"
    assert found != free, "no row is shorter: the check proves nothing"


def a_stop_string_of_a_row_ends_that_row_alone(case: GenerationCase) -> None:
    """A row without stop strings is not ended by another row's."""
    rows = prompts(case)
    long = _long_row(completions_of(complete(case, rows, greedy=True)))
    rows = [rows[long], rows[long]]  # the same prompt, so that both could be stopped
    free = completions_of(complete(case, rows, greedy=True))
    stop = _text(case, free[1][1:3])
    columns = {"stop_strings": [None, [stop]]}
    found = completions_of(complete(case, rows, greedy=True, columns=columns))
    expected = [free[0], _until(case, free[1], stop)]
    assert found == expected, f"with {stop!r} for row 1: {found}, not {expected}"
    assert expected[1] != free[1], "the row is no shorter: the check proves nothing"


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
    """Return the tokens up to the first whose text contains `stop`."""
    for end in range(1, len(tokens) + 1):
        if stop in _text(case, tokens[:end]):
            return tokens[:end]
    return tokens


WRONG = 1e-2
"""The smallest error caused by wrong weights; far above rounding."""


def who_sleeps_does_not_generate(case: GenerationCase) -> None:
    """The error names the call that wakes it; afterwards it generates."""
    backend = case.backend(max_new_tokens=NUM_NEW)
    case.sleep(backend)
    error = error_of(lambda: backend.generate(batch_of(case, prompts(case))))
    case.wake(backend)
    assert case.state_error is not None
    assert isinstance(error, case.state_error), f"a sleeping backend ended with {error!r}"
    assert "prepare_for_" in str(error), f"the error does not name the call that wakes: {error}"


def who_has_woken_generates_as_before(case: GenerationCase) -> None:
    """The same greedy tokens as before sleep, also after waking twice."""
    rows = prompts(case)
    before = complete(case, rows, greedy=True)
    backend = case.backend(max_new_tokens=NUM_NEW)
    case.sleep(backend)
    case.wake(backend)
    case.wake(backend)
    after = complete(case, rows, greedy=True)
    same = before["output_ids"].tolist() == after["output_ids"].tolist()
    assert same, "after a sleep other tokens are the most likely"


def samples_carry_the_committed_version(case: GenerationCase) -> None:
    """The output has `weight_version`, `[batch]` int64."""
    version = _version(case) + 1
    _refit(case, version)
    output = complete(case, prompts(case))
    column = output["weight_version"]
    assert column.dtype == torch.int64, f"'weight_version' is {column.dtype}"
    due = [version] * len(prompts(case))
    assert column.tolist() == due, f"'weight_version' is {column.tolist()}, not {due}"


def a_refit_changes_what_is_generated(case: GenerationCase) -> None:
    """The old weights are used before it and the new ones after it, in two refits."""
    for _ in range(2):
        _of(case).change_weights()
        before = largest_error(case, complete(case, prompts(case)))
        assert before > WRONG, "the change of weights is too small: the check proves nothing"
        _refit(case, _version(case) + 1)
        _require_right_weights(case)


def nothing_is_generated_before_the_commit(case: GenerationCase) -> None:
    """A version without received weights cannot be committed; a new update can begin."""
    backend = case.backend(max_new_tokens=NUM_NEW)
    version = _version(case)
    backend.begin_update(version + 1)
    batch = batch_of(case, prompts(case))
    early = error_of(lambda: backend.generate(batch))
    empty = error_of(lambda: backend.commit_update(version + 1))
    _refit(case, version + 2)
    assert case.state_error is not None
    assert isinstance(early, case.state_error), f"before the commit generate ended with {early!r}"
    assert isinstance(empty, case.state_error), f"a commit of nothing ended with {empty!r}"
    _require_right_weights(case)


def a_failed_refit_is_healed_by_a_full_one_alone(case: GenerationCase) -> None:
    """Until then neither `generate` nor `commit_update` succeeds."""
    backend = case.backend(max_new_tokens=NUM_NEW)
    version = _version(case) + 1
    _of(case).change_weights()
    _of(case).fail_refit(backend, version)
    batch = batch_of(case, prompts(case))
    sample = error_of(lambda: backend.generate(batch))
    commit = error_of(lambda: backend.commit_update(version))
    _refit(case, version)
    assert case.state_error is not None
    assert isinstance(sample, case.state_error), f"after a failed refit: {sample!r}"
    assert isinstance(commit, case.state_error), f"the commit of a failed refit: {commit!r}"
    _require_right_weights(case)
    assert _version(case) == version


def a_stale_version_changes_nothing(case: GenerationCase) -> None:
    """It raises a ValueError that names it, and the backend keeps working."""
    backend = case.backend(max_new_tokens=NUM_NEW)
    version = _version(case) + 1
    _refit(case, version)
    for stale in (version, version - 1):
        error = error_of(lambda stale=stale: backend.begin_update(stale))
        if not isinstance(error, ValueError):
            _refit(case, version + 1)  # what was begun must not outlast this rule
        assert isinstance(error, ValueError), f"version {stale} after {version}: {error!r}"
        assert str(stale) in str(error), f"the error does not name {stale}: {error}"
    assert _version(case) == version


def _of(case: GenerationCase) -> ReceivesWeights:
    assert isinstance(case, ReceivesWeights)
    return case


def _refit(case: GenerationCase, version: int) -> None:
    _of(case).refit(case.backend(max_new_tokens=NUM_NEW), version)


def _version(case: GenerationCase) -> int:
    return int(complete(case, prompts(case)[:1], max_new_tokens=1)["weight_version"][0])


def _require_right_weights(case: GenerationCase) -> None:
    error = largest_error(case, complete(case, prompts(case)))
    assert error <= case.tolerance, f"after the refit log-probabilities are off by {error:.2g}"
