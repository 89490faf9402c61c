"""Completions of the worker's own sampler, where its config lets it generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.config.resolve import GENERATION_DEFAULTS
from rl_interfaces.testing.expectations import expect, expect_close
from rl_interfaces.testing.report import NotApplicable, rule
from rl_interfaces.testing.worker.bench import WorkerBench
from rl_interfaces.testing.worker.oracle import plain_greedy

if TYPE_CHECKING:
    from rl_interfaces.testing.worker.case import Batch

LENGTHS = [4, 2, 6, 3, 5]


def _generation(bench: WorkerBench) -> dict[str, Any]:
    """Return the config's section with its defaults."""
    section = bench.case.config.get("generation")
    if section is None:
        raise NotApplicable("the config has no `generation`: the worker does not sample")
    unset = dict.fromkeys(("top_k", "stop_token_ids", "pad_token_id"))
    return {**unset, **GENERATION_DEFAULTS, **section}


def _prompts(bench: WorkerBench) -> Batch:
    return bench.share(bench.columns(LENGTHS))


def _is_generated(prompts: Batch, output: Any) -> torch.Tensor:
    """Return which places of `output_ids` were generated, `[batch, seq]` bool."""
    positions = torch.arange(output["output_ids"].shape[1])
    ends = output["unpadded_sequence_lengths"][:, None]
    return (positions >= prompts["input_lengths"][:, None]) & (positions < ends)


@rule()
def completions_follow_their_prompts(bench: WorkerBench) -> None:
    """Each row is its prompt, then its completion, then padding; the lengths say so."""
    generation, prompts = _generation(bench), _prompts(bench)
    output = bench.worker.generate(prompts)
    lengths = prompts["input_lengths"]
    totals, counts = output["unpadded_sequence_lengths"], output["generation_lengths"]
    expect(torch.equal(totals, lengths + counts), f"{totals} tokens are not {lengths} + {counts}")
    in_range = (counts >= 1) & (counts <= generation["max_new_tokens"])
    expect(in_range.all(), f"generation_lengths {counts} are not in 1..max_new_tokens")
    filler = bench.pad if generation["pad_token_id"] is None else generation["pad_token_id"]
    for row, (length, total) in enumerate(zip(lengths.tolist(), totals.tolist(), strict=True)):
        found, prompt = output["output_ids"][row], prompts["input_ids"][row, :length]
        expect(torch.equal(found[:length], prompt), f"row {row} does not begin with its prompt")
        expect((found[total:] == filler).all(), f"row {row} is not padded with {filler}: {found}")


@rule()
def greedy_completions_are_the_oracles(bench: WorkerBench) -> None:
    """With `greedy` the most likely token is taken each time, until a row ends."""
    generation, prompts = _generation(bench), _prompts(bench)
    output = bench.worker.generate(prompts, greedy=True)
    end = bench.case.tokenizer.eos_token_id
    stop = {end, *(generation["stop_token_ids"] or [])}
    limit = generation["max_new_tokens"]
    for row, length in enumerate(prompts["input_lengths"].tolist()):
        total = int(output["unpadded_sequence_lengths"][row])
        found = output["output_ids"][row, length:total].tolist()
        prompt = prompts["input_ids"][row, :length]
        with torch.no_grad():
            expected = plain_greedy(bench.oracle, prompt, max_new_tokens=limit, stop=stop)
        expect(found == expected, f"row {row} goes on with {found}, the oracle with {expected}")


@rule()
def sampled_tokens_have_the_policys_logprobs(bench: WorkerBench) -> None:
    """Generated tokens have the log-probabilities that `get_logprobs` gives; the rest are 0."""
    generation, prompts = _generation(bench), _prompts(bench)
    if generation["top_k"] is not None or generation["top_p"] != 1.0:
        raise NotApplicable("the config truncates: sampled and scored distributions differ")
    output = bench.worker.generate(prompts)
    scored = {
        "input_ids": output["output_ids"],
        "input_lengths": output["unpadded_sequence_lengths"],
    }
    batch = type(prompts)()
    batch.update(scored)
    expected = bench.worker.get_logprobs(batch)["logprobs"]
    generated, found = _is_generated(prompts, output), output["logprobs"]
    limit = bench.tolerances.logprob
    expect_close(found[generated], expected[generated], "logprobs of the output", atol=limit)
    expect(not found[~generated].any(), "logprobs are not 0 at prompts and padding")
