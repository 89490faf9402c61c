"""Real vLLM engines over Ray: what they sample, held against plain transformers."""

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S
from processes import descendants
from rl_policy import RayVirtualCluster
from rl_policy.generation.state import EngineStateError
from rl_policy.generation.vllm import VllmGeneration
from rl_policy.ray.failures import WorkerDiedError, WorkerGroupError
from transformers import AutoModelForCausalLM
from vllm_oracles import (
    MAX_MODEL_LEN,
    TEXTS,
    TOLERANCE,
    ascii_tokenizer,
    completion_of,
    completions_of,
    expected_logprobs,
    generation_config,
    greedy_completion,
    keep_nucleus,
    prompts_of,
    save_llama,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.needs("rl-policy[vllm]")]


@pytest.fixture(scope="module")
def tokenizer():
    return ascii_tokenizer()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("llama")
    save_llama(path, tokenizer)
    return path


@pytest.fixture(scope="module")
def model(model_path):
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def start_engines(model_path, tokenizer):
    """Return a function that starts engines on shared bundles; all end with the module."""
    cluster = RayVirtualCluster([2], max_colocated_worker_groups=2)
    started = [cluster]

    def start(num_engines, **engine_kwargs):
        config = generation_config(model_path, weight_transfer=False, engine_kwargs=engine_kwargs)
        engines = VllmGeneration(
            cluster, config, tokenizer, workers_per_node=num_engines, timeout_s=PATIENCE_S
        )
        started.append(engines)
        return engines

    yield start
    for part in reversed(started):
        part.shutdown()


@pytest.fixture(scope="module")
def engines(start_engines):
    return start_engines(2)


@pytest.fixture(scope="module")
def first_sample(engines, tokenizer):
    """Return what fresh engines sample in their first call."""
    return engines.generate(prompts_of(tokenizer, TEXTS))


@pytest.fixture
def change_sampling(engines, monkeypatch):
    """Return a function that changes how the running engines sample, for one test."""

    def change(**changes):
        monkeypatch.setattr(engines, "_sampling", replace(engines._sampling, **changes))

    return change


def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(first_sample, model):
    assert (first_sample["generation_lengths"] >= 1).all()
    expected = expected_logprobs(model, first_sample, temperature=0.7)
    torch.testing.assert_close(first_sample["logprobs"], expected, atol=TOLERANCE, rtol=0)
    untempered = expected_logprobs(model, first_sample)
    assert (untempered - expected).abs().max() > 0.1
    assert first_sample["weight_version"].tolist() == [-1] * len(TEXTS)


def test_greedy_is_the_argmax_of_transformers_on_ragged_prompts(engines, model, tokenizer):
    prompts = prompts_of(tokenizer, TEXTS)
    output = engines.generate(prompts, greedy=True)
    for row, length in enumerate(prompts["input_lengths"]):
        prompt = prompts["input_ids"][row, :length].tolist()
        assert output["output_ids"][row, :length].tolist() == prompt
        stops = {tokenizer.eos_token_id}
        expected = greedy_completion(model, prompt, num_tokens=8, stops=stops)
        assert completion_of(output, row) == expected
        end = int(output["unpadded_sequence_lengths"][row])
        assert end == length + len(expected)
        assert (output["output_ids"][row, end:] == tokenizer.pad_token_id).all()
        assert (output["logprobs"][row, end:] == 0).all()
    # Greedy log-probabilities are untempered, whatever the temperature of sampling is.
    expected = expected_logprobs(model, output)
    torch.testing.assert_close(output["logprobs"], expected, atol=TOLERANCE, rtol=0)


def test_more_prompts_than_a_step_of_the_engine_takes(start_engines, engines, tokenizer):
    """vLLM takes the rest in later steps; a part of a prompt would break its seeded sampling."""
    narrow = start_engines(1, max_num_batched_tokens=MAX_MODEL_LEN)
    texts = ["a prompt of 21 tokens"] * 12
    try:
        output = narrow.generate(prompts_of(tokenizer, texts))
    finally:
        narrow.shutdown()
    assert (output["generation_lengths"] >= 1).all()


def test_fewer_rows_than_engines(engines, tokenizer):
    both = engines.generate(prompts_of(tokenizer, TEXTS[:2]), greedy=True)
    one = engines.generate(prompts_of(tokenizer, TEXTS[:1]), greedy=True)
    assert completion_of(one, 0) == completion_of(both, 0)


def test_two_calls_and_two_engines_sample_differently(engines, tokenizer):
    prompts = prompts_of(tokenizer, ["the same prompt"] * 8)
    first, second = (completions_of(engines.generate(prompts)) for _ in range(2))
    assert len({tuple(tokens) for tokens in first + second}) == 16


def test_a_greedy_call_takes_no_sample_of_a_later_one(engines, tokenizer, monkeypatch):
    prompts = prompts_of(tokenizer, ["the same prompt"] * 4)
    monkeypatch.setattr(engines, "_calls_since_version", 100)
    expected = completions_of(engines.generate(prompts))
    monkeypatch.setattr(engines, "_calls_since_version", 100)
    engines.generate(prompts, greedy=True)
    assert completions_of(engines.generate(prompts)) == expected


def test_the_order_is_the_callers_over_two_engines(engines, tokenizer):
    assert engines.num_engines == 2
    forward = completions_of(engines.generate(prompts_of(tokenizer, TEXTS), greedy=True))
    backward = completions_of(engines.generate(prompts_of(tokenizer, TEXTS[::-1]), greedy=True))
    assert backward == forward[::-1]
    assert len({tuple(tokens) for tokens in forward}) == len(TEXTS)


def test_a_row_stops_at_its_own_string_and_includes_it(engines, model, tokenizer):
    prompts = prompts_of(tokenizer, TEXTS[:2])
    free = completions_of(engines.generate(prompts, greedy=True))
    text = tokenizer.decode(free[1])
    assert len(text) == 8
    output = engines.generate(
        prompts_of(tokenizer, TEXTS[:2], stop_strings=[None, [text[2:4]]]), greedy=True
    )
    assert completion_of(output, 0) == free[0]
    stopped = tokenizer.decode(completion_of(output, 1))
    assert stopped == text[: text.index(text[2:4]) + 2]
    expected = expected_logprobs(model, output)
    torch.testing.assert_close(output["logprobs"], expected, atol=TOLERANCE, rtol=0)


def test_a_configured_stop_token_ends_a_row_and_is_part_of_it(engines, tokenizer, change_sampling):
    prompts = prompts_of(tokenizer, TEXTS)
    free = completions_of(engines.generate(prompts, greedy=True))
    stop = free[0][3]
    change_sampling(stop_token_ids=(tokenizer.eos_token_id, stop))
    stopped = completions_of(engines.generate(prompts, greedy=True))
    assert stopped == [
        tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in free
    ]
    assert stopped[0][-1] == stop


def test_a_configured_stop_string_may_span_tokens(engines, tokenizer, change_sampling):
    prompts = prompts_of(tokenizer, TEXTS[:1])
    (free,) = completions_of(engines.generate(prompts, greedy=True))
    text = tokenizer.decode(free)
    change_sampling(stop_strings=(text[1:4],))
    (stopped,) = completions_of(engines.generate(prompts, greedy=True))
    assert tokenizer.decode(stopped) == text[: text.index(text[1:4]) + 3]


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (None, 0.6), (10, 0.5)])
def test_truncation_counts_in_logprobs(engines, model, tokenizer, change_sampling, top_k, top_p):
    change_sampling(top_k=top_k, top_p=top_p)
    output = engines.generate(prompts_of(tokenizer, TEXTS * 3))
    expected = expected_logprobs(
        model,
        output,
        temperature=0.7,
        truncate=lambda logits: keep_nucleus(logits, top_k=top_k, top_p=top_p),
    )
    torch.testing.assert_close(output["logprobs"], expected, atol=TOLERANCE, rtol=0)
    whole = expected_logprobs(model, output, temperature=0.7)
    assert (whole - expected).abs().max() > 0.05


def test_a_prompt_grows_to_the_longest_row_and_a_full_one_is_refused(engines, tokenizer):
    output = engines.generate(prompts_of(tokenizer, ["a" * (MAX_MODEL_LEN - 2)]), greedy=True)
    assert output["unpadded_sequence_lengths"].tolist() == [MAX_MODEL_LEN]
    with pytest.raises(ValueError, match=r"'input_lengths'\[1\]=48 leaves no room"):
        engines.generate(prompts_of(tokenizer, ["a", "a" * MAX_MODEL_LEN]))


def test_a_token_that_the_model_lacks_is_refused(engines, tokenizer):
    prompts = prompts_of(tokenizer, TEXTS)
    prompts["input_ids"][0, 0] = len(tokenizer)
    with pytest.raises(ValueError, match=f"is not one of the model's {len(tokenizer)} tokens"):
        engines.generate(prompts)


def test_an_engine_that_sleeps_does_not_sample(engines, tokenizer):
    prompts = prompts_of(tokenizer, TEXTS)
    before = completions_of(engines.generate(prompts, greedy=True))
    assert engines.finish_generation()
    with pytest.raises(EngineStateError, match=r"call prepare_for_generation\(\) first"):
        engines.generate(prompts)
    assert not engines.prepare_for_generation(tags=["weights"])
    with pytest.raises(EngineStateError, match="while kv_cache sleep"):
        engines.generate(prompts)
    assert engines.prepare_for_generation(tags=["kv_cache"])
    assert completions_of(engines.generate(prompts, greedy=True)) == before


def test_an_engine_whose_weights_are_lost_does_not_sample_until_all_are_back(engines, tokenizer):
    with pytest.raises(EngineStateError, match=r"call begin_update\(3\) first"):
        engines.wait_for_update(engines.update(3))
    with pytest.raises(RuntimeError, match="Weight transfer not configured"):
        engines.begin_update(3)
    with pytest.raises(EngineStateError, match="the refit to version 3 failed"):
        engines.generate(prompts_of(tokenizer, TEXTS))


def hosts():
    """Return the processes of this test's Ray that hold a worker."""

    def title(pid):
        try:
            return Path(f"/proc/{pid}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ""

    return {pid for pid in descendants(os.getpid()) if "ray::WorkerHost" in title(pid)}


def test_a_failed_start_leaves_nothing(engines, start_engines, wait_until_gone):
    before = hosts()
    assert {facts.process_id for facts in engines.facts} <= before
    with pytest.raises(TypeError, match="nonsense"):
        start_engines(1, nonsense=True)
    wait_until_gone(hosts() - before)


def test_samples_repeat_on_another_number_of_engines_and_shutdown_ends_all(
    first_sample, start_engines, tokenizer, wait_until_gone
):
    before = hosts()
    one = start_engines(1)
    again = one.generate(prompts_of(tokenizer, TEXTS))
    assert torch.equal(again["output_ids"], first_sample["output_ids"])
    own = hosts() - before
    processes = own.union(*(descendants(pid) for pid in own))
    assert one.facts[0].process_id in processes
    assert one.shutdown()
    wait_until_gone(processes)
    assert one.shutdown()
    with pytest.raises(WorkerGroupError, match="it was shut down"):
        one.generate(prompts_of(tokenizer, TEXTS))


def test_a_dead_engine_is_named_and_the_others_end(engines, tokenizer, wait_until_gone):
    processes = [facts.process_id for facts in engines.facts]
    os.kill(processes[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 1 of vllm died during"):
        engines.generate(prompts_of(tokenizer, TEXTS))
    wait_until_gone(processes)
    with pytest.raises(WorkerGroupError, match=re.escape("vllm has ended")):
        engines.generate(prompts_of(tokenizer, TEXTS))
