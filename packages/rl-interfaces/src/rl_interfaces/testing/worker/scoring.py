"""Rules on completions, log-probabilities and scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_interfaces.config.resolve import GENERATION_DEFAULTS
from rl_interfaces.testing.expectations import expect, expect_close, expect_unlike
from rl_interfaces.testing.report import NotApplicable, rule
from rl_interfaces.testing.worker.bench import WorkerBench
from rl_interfaces.testing.worker.oracle import (
    LogprobLoss,
    SupervisedLoss,
    is_target,
    plain_greedy,
    plain_logprobs,
    plain_loss,
    row_logits,
)
from rl_interfaces.worker import RowScoringWorker, TopkLogitsWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_interfaces.config.types import ResolvedConfig
    from rl_interfaces.testing.worker.oracle import Batch

LENGTHS = [4, 2, 6, 3, 5]


def _generation(bench: WorkerBench) -> ResolvedConfig:
    """Return the config's section with its defaults."""
    section = bench.case.config.get("generation")
    if section is None:
        raise NotApplicable("the config has no `generation`: the worker does not sample")
    unset = dict.fromkeys(("top_k", "stop_token_ids", "pad_token_id"))
    return {**unset, **GENERATION_DEFAULTS, **section}


def _prompts(bench: WorkerBench) -> Batch:
    return bench.share(bench.columns(LENGTHS))


def _is_generated(prompts: Batch, output: Batch) -> torch.Tensor:
    """Return which positions of `output_ids` were generated, `[batch, seq]` bool."""
    positions = torch.arange(output["output_ids"].shape[1])
    ends = output["unpadded_sequence_lengths"][:, None]
    return (positions >= prompts["input_lengths"][:, None]) & (positions < ends)


@rule()
def completions_follow_their_prompts(bench: WorkerBench) -> None:
    """Each row is prompt, completion and padding, with the reported lengths."""
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
    """With `greedy`, each token is the most likely one, until a row ends."""
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
    """Generated tokens have the log-probabilities of `get_logprobs`; the rest are 0."""
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


TOP = 3
OTHER_TEMPERATURE = 0.7
SIZES = (None, 1, 2)
"""Rows of a micro-batch; None: the configured number."""


def _calls(bench: WorkerBench) -> dict[str, Callable[..., Batch]]:
    return {
        "logprobs": bench.worker.get_logprobs,
        "reference_logprobs": bench.worker.get_reference_policy_logprobs,
    }


@rule()
def logprobs_equal_the_oracle(bench: WorkerBench) -> None:
    """Log-probabilities are the oracle's, for even, ragged and single rows of any width."""
    for lengths in ([6, 6, 6, 6], [11, 3, 7, 1, 5], [13, 2, 9], [4]):
        columns = bench.columns(lengths, seed=len(lengths))
        mine = bench.share(columns)
        found = bench.worker.get_logprobs(mine)["logprobs"]
        bench.expect_logprobs(found, bench.expected_logprobs(columns), mine, f"{lengths=}")


@rule()
def logprobs_have_the_batchs_shape(bench: WorkerBench) -> None:
    """Log-probabilities are float32 on the CPU, in the shape of `input_ids`."""
    columns = bench.columns([5, 3, 4, 2, 5], width=9)
    mine = bench.share(columns)
    for key, call in _calls(bench).items():
        found = call(mine)[key]
        expect(found.shape == mine["input_ids"].shape, f"{key} has shape {list(found.shape)}")
        expect(found.dtype == torch.float32, f"{key} is {found.dtype}, not float32")
        expect(found.device.type == "cpu", f"{key} is on {found.device}, not on the CPU")


@rule()
def logprobs_are_zero_where_no_token_is_scored(bench: WorkerBench) -> None:
    """Position 0 and padding are 0, of the policy and of the reference."""
    mine = bench.share(bench.columns(bench.on_every_rank([6, 2, 4, 3, 6, 1]), width=6))
    outside = ~is_target(mine)
    for key, call in _calls(bench).items():
        found = call(mine)[key]
        expect(not found[outside].any(), f"{key}: {found} is not 0 at position 0 and padding")
        expect(found[~outside].any() or outside.all(), f"every one of the {key} is 0")


@rule()
def micro_batches_do_not_change_logprobs(bench: WorkerBench) -> None:
    """Log-probabilities are the same for any `micro_batch_size`."""
    mine = bench.share(bench.scoring)
    for key, call in _calls(bench).items():
        default = call(mine)[key]
        for size in (1, 2, 16):
            found = call(mine, micro_batch_size=size)[key]
            what = f"{key} with micro_batch_size={size}"
            expect_close(found, default, what, atol=bench.tolerances.logprob)


@rule()
def temperature_divides_the_logits(bench: WorkerBench) -> None:
    """Policy, reference and loss score under the configured temperature."""
    if bench.case.config.get("generation") is None:
        raise NotApplicable("the config has no `generation`, and so no temperature")
    columns = bench.scoring
    expected = plain_logprobs(bench.oracle, columns, temperature=OTHER_TEMPERATURE)
    expect_unlike(expected, bench.expected_logprobs(columns), "both temperatures' scores")
    with bench.fresh({"generation": {"temperature": OTHER_TEMPERATURE}}) as worker:
        mine = bench.share(columns)
        policy = worker.get_logprobs(mine)["logprobs"]
        reference = worker.get_reference_policy_logprobs(mine)["reference_logprobs"]
        result = worker.train(mine, LogprobLoss(), eval_mode=True, gbs=bench.global_batch_size * 4)
    bench.expect_logprobs(policy, expected, mine, "get_logprobs")
    bench.expect_logprobs(reference, expected, mine, "get_reference_policy_logprobs")
    with torch.no_grad():
        loss = plain_loss(bench.oracle, columns, temperature=OTHER_TEMPERATURE)
    expect_close(result["global_loss"][0], loss, "train", rtol=bench.tolerances.loss)


@rule()
def supervised_losses_have_no_temperature(bench: WorkerBench) -> None:
    """A loss without `uses_sampling_temperature`, and scores for it, are of the model itself."""
    if bench.case.config.get("generation") is None:
        raise NotApplicable("the config has no `generation`, and so no temperature")
    columns = bench.scoring
    expected = plain_logprobs(bench.oracle, columns, temperature=1.0)
    with bench.fresh({"generation": {"temperature": OTHER_TEMPERATURE}}) as worker:
        mine, size = bench.share(columns), bench.global_batch_size * 4
        policy = worker.get_logprobs(mine, temperature=1.0)["logprobs"]
        reference = worker.get_reference_policy_logprobs(mine, temperature=1.0)
        result = worker.train(mine, SupervisedLoss(), eval_mode=True, gbs=size)
    bench.expect_logprobs(policy, expected, mine, "get_logprobs")
    bench.expect_logprobs(
        reference["reference_logprobs"], expected, mine, "get_reference_policy_logprobs"
    )
    with torch.no_grad():
        loss = plain_loss(bench.oracle, columns, temperature=1.0)
    expect_close(result["global_loss"][0], loss, "train", rtol=bench.tolerances.loss)


@rule()
def the_reference_stays_the_initial_model(bench: WorkerBench) -> None:
    """The reference is the model of `model_name`, whatever is trained, loaded or scored."""
    expected = bench.expected_logprobs(bench.scoring)
    mine = bench.share(bench.scoring)
    with bench.fresh(weights_path=bench.saved.weights) as worker:
        first = worker.get_reference_policy_logprobs(mine)["reference_logprobs"].clone()
        bench.train(worker)
        policy = worker.get_logprobs(mine)["logprobs"]
        later = worker.get_reference_policy_logprobs(mine)["reference_logprobs"]
        again = worker.get_logprobs(mine)["logprobs"]
        worker.load_checkpoint(bench.saved.weights)
        last = worker.get_reference_policy_logprobs(mine)["reference_logprobs"]
    bench.expect_logprobs(first, expected, mine, "the reference of a worker with other weights")
    bench.expect_logprobs(later, expected, mine, "the reference after a step")
    bench.expect_logprobs(last, expected, mine, "the reference after `load_checkpoint`")
    expect_close(again, policy, "the policy after its reference", atol=bench.tolerances.repeat)
    places = is_target(mine)
    if places.any():
        expect_unlike(policy[places], later[places], "policy and reference after training")


@rule(needs=TopkLogitsWorker)
def topk_logits_equal_the_oracle(bench: WorkerBench) -> None:
    """The largest logits are the oracle's, largest first, and 0 at padding, for any micro-batch."""
    for size in SIZES:
        _expect_topk(bench, size)


def _expect_topk(bench: WorkerBench, size: int | None) -> None:
    columns = bench.scoring
    mine = bench.share(columns)
    found = bench.worker.get_topk_logits(mine, TOP, micro_batch_size=size)
    values, indices = found["topk_logits"], found["topk_indices"]
    shape = (*mine["input_ids"].shape, TOP)
    expect(values.shape == indices.shape == shape, f"shapes {values.shape}, {indices.shape}")
    expect(values.dtype == torch.float32, f"topk_logits are {values.dtype}, not float32")
    for place, row in enumerate(mine["row_id"].tolist()):
        length = int(columns["input_lengths"][row])
        tokens = columns["input_ids"][row, :length]
        with torch.no_grad():
            logits = row_logits(bench.oracle, tokens, temperature=1.0)
        top = logits.topk(TOP).values
        limit = {"atol": bench.tolerances.logprob}
        what = f"row {row} with micro_batch_size={size}"
        expect_close(values[place, :length], top, what, **limit)
        chosen = logits.gather(-1, indices[place, :length])
        expect_close(chosen, top, f"the logits of the indices of {what}", **limit)
        expect(not values[place, length:].any(), f"row {row} has logits at padding")


@rule(needs=RowScoringWorker)
def scores_equal_the_oracle(bench: WorkerBench) -> None:
    """A reward model's scores are the oracle's, one per row, for any micro-batch."""
    reward = bench.case.reward
    if reward is None:
        raise NotApplicable("the case names no reward model (`WorkerCase.reward`)")
    columns = bench.scoring
    mine = bench.share(columns)
    with bench.fresh(reward.settings, init_optimizer=False, init_reference_model=False) as worker:
        scores = {size: worker.score(mine, micro_batch_size=size)["scores"] for size in SIZES}
    rows = zip(columns["input_ids"], columns["input_lengths"].tolist(), strict=True)
    with torch.no_grad():
        expected = torch.stack([reward.score(ids[:length]) for ids, length in rows])
    expect_unlike(expected[0], expected[1], "the scores of two rows")
    for size, found in scores.items():
        what = f"scores with micro_batch_size={size}"
        expect(found.dtype == torch.float32, f"{what} are {found.dtype}, not float32")
        expect_close(found, expected[mine["row_id"]], what, atol=bench.tolerances.logprob)
