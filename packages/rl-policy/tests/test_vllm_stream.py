"""Submissions to real vLLM engines: out of order, beside a refit, cancelled, and with a death."""

import os
import signal
import sys
import time

import pytest
import ray
import rl_refit
import torch
from kept_clusters import kept_cluster
from patience import PATIENCE_S
from rl_interfaces import NOT_SAMPLED, StreamFullError, TicketsLostError
from rl_policy.generation.state import EngineStateError
from rl_policy.generation.vllm import VllmGeneration
from rl_policy.generation.vllm.stream import EngineLostError
from vllm_oracles import (
    TEXTS,
    TOLERANCE,
    completions_of,
    endless_tokenizer,
    expected_logprobs,
    generation_config,
    long_llama,
    prompts_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.needs("rl-policy[vllm]")]

# Engines cannot import this module, whose functions are sent to them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

NEW_TOKENS = 600
TEMPERATURE = 0.7
LONG, SHORT = "a long one", "a short one~"


@pytest.fixture(scope="module")
def tokenizer():
    return endless_tokenizer()


@pytest.fixture(scope="module")
def models(tokenizer):
    return {version: long_llama(tokenizer, seed=version) for version in (0, 1, 2)}


@pytest.fixture(scope="module")
def start_engines(tmp_path_factory, tokenizer, models, shared_ray):
    path = tmp_path_factory.mktemp("llama")
    models[0].save_pretrained(path)
    tokenizer.save_pretrained(path)
    started = []

    def start(num_engines, **options):
        cluster = kept_cluster([num_engines])
        started.append(cluster)
        config = generation_config(path, max_model_len=1024, engine_kwargs={"block_size": 32})
        config = config | {"max_new_tokens": NEW_TOKENS, "temperature": TEMPERATURE} | options
        engines = VllmGeneration(cluster, config, tokenizer, timeout_s=PATIENCE_S)
        started.append(engines)
        return engines

    yield start
    for part in reversed(started):
        part.shutdown()


@pytest.fixture(scope="module")
def engines(start_engines):
    return start_engines(1)


def refit(engines, model, version, **options):
    with rl_refit.RefitSender(
        rl_refit.TensorSource(model.state_dict()),
        num_receivers=engines.num_receivers,
        timeout_s=PATIENCE_S,
    ) as sender:
        engines.init_transfer(sender.address)
        engines.begin_update(version, **options)
        call = engines.update(version)
        sender.send(version)
        engines.wait_for_update(call)
        engines.commit_update(version)
        sender.commit(version)


def short_prompts(tokenizer, count):
    """Return prompts whose completions stop at almost any character."""
    stops = [[chr(code) for code in range(33, 127)]] * count
    return prompts_of(tokenizer, [SHORT] * count, stop_strings=stops)


def collect_all(engines, tickets):
    found = {}
    while len(found) < len(tickets):
        finished = engines.collect(set(tickets) - set(found), timeout_s=PATIENCE_S)
        assert finished
        found |= {each.ticket: each for each in finished}
    return found


def test_a_submission_overtakes_another_that_samples(engines, tokenizer, models):
    slow = engines.submit(prompts_of(tokenizer, [LONG] * 2))
    quick = engines.submit(short_prompts(tokenizer, 3))
    (first,) = engines.collect(timeout_s=PATIENCE_S)
    assert first.ticket == quick
    assert first.finish_reasons == ("stop",) * 3
    # A call of the batch kind shares the steps too, and does not end after the long one.
    engines.generate(short_prompts(tokenizer, 1), greedy=True)
    assert engines.collect([slow], timeout_s=0) == []
    (last,) = engines.collect([slow], timeout_s=PATIENCE_S)
    assert last.finish_reasons == ("length",) * 2
    assert last.output["generation_lengths"].tolist() == [NEW_TOKENS] * 2
    for finished in (first, last):
        output = finished.output
        expected = expected_logprobs(models[0], output, temperature=TEMPERATURE)
        torch.testing.assert_close(output["logprobs"], expected, atol=TOLERANCE, rtol=0)
        sampled = output["weight_versions"] != NOT_SAMPLED
        assert (sampled == (output["logprobs"] != 0)).all()
        assert set(output["weight_versions"][sampled].tolist()) == {-1}


def test_random_numbers_depend_on_the_call_and_not_on_what_runs_beside(engines, tokenizer):
    def run(together):
        # As if the weights had just come.
        engines._calls_since_version = 0
        tickets = []
        for text in TEXTS[:3]:
            tickets.append(engines.submit(prompts_of(tokenizer, [text] * 2)))
            if not together:
                collected.update(collect_all(engines, tickets[-1:]))
        if together:
            collected.update(collect_all(engines, tickets))
        return [completions_of(collected[ticket].output) for ticket in tickets]

    collected = {}
    alone, together = run(together=False), run(together=True)
    assert alone == together
    assert alone[0][0] != alone[0][1]
    engines._calls_since_version = 1
    batch = engines.generate(prompts_of(tokenizer, [TEXTS[1]] * 2))
    assert completions_of(batch) == alone[1]


def test_a_staged_refit_reaches_requests_that_run(engines, tokenizer, models):
    refit(engines, models[0], 0, staging="host")
    ticket = engines.submit(prompts_of(tokenizer, [LONG] * 4))
    refit(engines, models[1], 1, staging="host")
    later = engines.submit(short_prompts(tokenizer, 1))
    found = collect_all(engines, [ticket, later])
    versions = found[ticket].output["weight_versions"]
    sampled = versions != NOT_SAMPLED
    assert set(versions[sampled].tolist()) == {0, 1}
    assert found[ticket].output["weight_version"].tolist() == [0] * 4
    assert found[later].output["weight_version"].tolist() == [1]
    output = found[ticket].output
    for version in (0, 1):
        expected = expected_logprobs(models[version], output, temperature=TEMPERATURE)
        errors = (output["logprobs"] - expected)[versions == version].abs()
        assert errors.max() < TOLERANCE


def test_an_update_in_place_waits_for_submissions_and_sleep_refuses(engines, tokenizer, models):
    ticket = engines.submit(prompts_of(tokenizer, [LONG]))
    with pytest.raises(EngineStateError, match="requests run: collect or cancel"):
        engines.finish_generation()
    refit(engines, models[2], 2)
    (finished,) = engines.collect([ticket], timeout_s=PATIENCE_S)
    versions = finished.output["weight_versions"]
    assert set(versions[versions != NOT_SAMPLED].tolist()) == {1}
    engines.begin_update(3)
    refused = engines.submit(prompts_of(tokenizer, [LONG]))
    with pytest.raises(TicketsLostError, match=r"failed .* on their way") as error:
        engines.collect([refused], timeout_s=PATIENCE_S)
    assert error.value.tickets == [refused]
    assert engines.room == 16
    refit(engines, models[2], 3)
    assert engines.generate(short_prompts(tokenizer, 1))["weight_version"].tolist() == [3]


def test_a_cancelled_submission_frees_the_engine(engines, tokenizer):
    tickets = [engines.submit(prompts_of(tokenizer, [LONG] * 8)) for _ in range(2)]
    with pytest.raises(StreamFullError, match="16 rows are in flight"):
        engines.submit(short_prompts(tokenizer, 1))
    kept = engines._calls_since_version
    engines.cancel(tickets[:1])
    assert engines.room == 8
    assert engines._calls_since_version == kept
    engines.cancel(tickets[1:])
    deadline = time.monotonic() + PATIENCE_S
    while any(engines.membership.on_all_beside("is_sampling")):
        assert time.monotonic() < deadline
    assert engines.collect(timeout_s=0) == []
    (finished,) = collect_all(engines, [engines.submit(short_prompts(tokenizer, 8))]).values()
    assert finished.finish_reasons == ("stop",) * 8


def test_an_engine_that_dies_is_replaced_while_the_other_goes_on(start_engines, models, tokenizer):
    """What it was sampling is sampled again; it catches up alone, and is in the next refit."""
    engines = start_engines(2, colocated={"enabled": False})
    sender = rl_refit.RefitSender(
        rl_refit.TensorSource(models[1].state_dict()),
        num_receivers=2,
        min_receivers=1,
        timeout_s=PATIENCE_S,
    )
    engines.init_transfer(sender.address)

    def send(version):
        call = engines.update(version)
        sender.send(version, receivers=engines.membership.receivers)
        engines.wait_for_update(call)
        engines.commit_update(version)

    engines.begin_update(1)
    send(1)
    tickets = [engines.submit(prompts_of(tokenizer, [LONG])) for _ in range(4)]
    dead = engines.facts[0].process_id
    os.kill(dead, signal.SIGKILL)
    finished = collect_all(engines, tickets)
    assert finished.keys() == set(tickets)
    for each in finished.values():
        versions = each.output["weight_versions"]
        assert set(versions[versions != NOT_SAMPLED].tolist()) == {1}
    assert (engines.membership.num_replaced, engines.has_lost_engine) == (1, False)
    # Of the one that is left.
    assert engines.generate(short_prompts(tokenizer, 3))["weight_version"].tolist() == [1] * 3

    deadline = time.monotonic() + PATIENCE_S
    while not engines.membership.has_joined:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    beside = engines.submit(prompts_of(tokenizer, [LONG]))
    engines.begin_catch_up(1)
    assert engines.membership.receivers == [0]
    send(1)
    assert not engines.membership.has_joined
    assert engines.facts[0].process_id != dead
    assert collect_all(engines, [beside]).keys() == {beside}
    # Rows of both, with the weights that the sender has.
    output = engines.generate(prompts_of(tokenizer, TEXTS))
    assert output["weight_version"].tolist() == [1] * len(TEXTS)
    expected = expected_logprobs(models[1], output, temperature=TEMPERATURE)
    assert (output["logprobs"] - expected).abs().max() < TOLERANCE
    engines.begin_update(2, staging="host")
    assert engines.membership.receivers == [0, 1]
    send(2)
    assert engines.update_metrics()["refit_staged"] == 1.0
    assert engines.generate(short_prompts(tokenizer, 4))["weight_version"].tolist() == [2] * 4
    sender.close()


def test_engines_that_have_all_died_are_named_with_what_they_sampled(engines, tokenizer):
    tickets = [engines.submit(prompts_of(tokenizer, [LONG])) for _ in range(2)]
    os.kill(engines.facts[0].process_id, signal.SIGKILL)
    with pytest.raises(EngineLostError, match="rank 0 of vllm died") as error:
        engines.collect(tickets[:1], timeout_s=PATIENCE_S)
    assert error.value.tickets == tickets
