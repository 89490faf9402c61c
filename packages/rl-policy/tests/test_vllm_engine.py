"""Real vLLM engines over Ray: what they sample, held against plain transformers."""

import pytest
import torch
from rl_batched_data import BatchedDataDict
from rl_policy import RayVirtualCluster
from rl_policy.generation.engine_state import EngineStateError
from rl_policy.recipes.tiny_model import build_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.vllm

# float32 kernels of vLLM and torch differ in the last bits: 1e-6 was measured.
TOLERANCE = 1e-4
MAX_MODEL_LEN = 48


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        # Large, so that the distribution is far from uniform.
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).float().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(model_path):
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def generation_config(model_path, **changes):
    config = {
        "backend": "vllm",
        "model_name": str(model_path),
        "max_new_tokens": 8,
        "temperature": 0.7,
        "vllm_cfg": {
            "precision": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 16 << 20,
            "enforce_eager": True,
            "weight_transfer_backend": None,
        },
    }
    return config | changes


@pytest.fixture(scope="module")
def start_engines(model_path, tokenizer):
    """Return a function that starts engines on bundles of their own; all end with the module."""
    from rl_policy.generation.vllm import VllmGeneration

    started = []

    def start(num_bundles=1, seed=0, **changes):
        cluster = RayVirtualCluster([num_bundles])
        started.append(cluster)
        config = generation_config(model_path, **changes)
        engines = VllmGeneration(cluster, config, tokenizer, seed=seed, timeout_s=240.0)
        started.append(engines)
        return engines

    yield start
    for part in reversed(started):
        part.shutdown()


@pytest.fixture(scope="module")
def engines(start_engines):
    return start_engines(num_bundles=2)


def prompts_of(tokenizer, texts, **keys):
    rows = [tokenizer.encode(text) for text in texts]
    lengths = torch.tensor([len(row) for row in rows])
    input_ids = torch.full((len(rows), int(lengths.max())), tokenizer.pad_token_id)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.tensor(row)
    return BatchedDataDict({"input_ids": input_ids, "input_lengths": lengths, **keys})


def expected_logprobs(model, output, *, temperature=1.0):
    """Return the log-probability of every token behind the prompt, by plain transformers."""
    expected = torch.zeros_like(output["logprobs"])
    lengths, generated = output["unpadded_sequence_lengths"], output["generation_lengths"]
    for row, ids in enumerate(output["output_ids"]):
        end, count = int(lengths[row]), int(generated[row])
        with torch.no_grad():
            logits = model(ids[None, :end]).logits[0].float() / temperature
        logprobs = logits.log_softmax(-1)[:-1].gather(-1, ids[1:end, None])[:, 0]
        expected[row, end - count : end] = logprobs[end - count - 1 :]
    return expected


TEXTS = ["the first prompt", "ab", "a third, which is longer", "x", "one more"]


def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engines, model, tokenizer):
    output = engines.generate(prompts_of(tokenizer, TEXTS))
    assert (output["generation_lengths"] >= 1).all()
    expected = expected_logprobs(model, output, temperature=0.7)
    torch.testing.assert_close(output["logprobs"], expected, atol=TOLERANCE, rtol=0)
    untempered = expected_logprobs(model, output)
    assert (untempered - expected).abs().max() > 0.1
    assert output["weight_version"].tolist() == [-1] * len(TEXTS)


def completion_of(output, row):
    end, count = output["unpadded_sequence_lengths"][row], output["generation_lengths"][row]
    return output["output_ids"][row, end - count : end].tolist()


def completions_of(output):
    return [completion_of(output, row) for row in range(len(output["output_ids"]))]


def greedy_completion(model, prompt, *, num_tokens, stops):
    """Return the most likely continuation, by plain transformers, a full forward per token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


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


def test_fewer_rows_than_engines(engines, tokenizer):
    both = engines.generate(prompts_of(tokenizer, TEXTS[:2]), greedy=True)
    one = engines.generate(prompts_of(tokenizer, TEXTS[:1]), greedy=True)
    assert completion_of(one, 0) == completion_of(both, 0)


def test_two_calls_and_two_engines_sample_differently(engines, tokenizer):
    prompts = prompts_of(tokenizer, ["the same prompt"] * 8)
    first, second = (completions_of(engines.generate(prompts)) for _ in range(2))
    assert len({tuple(tokens) for tokens in first + second}) == 16


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


def test_a_prompt_grows_to_the_longest_row_and_a_full_one_is_refused(engines, tokenizer):
    output = engines.generate(prompts_of(tokenizer, ["a" * (MAX_MODEL_LEN - 2)]), greedy=True)
    assert output["unpadded_sequence_lengths"].tolist() == [MAX_MODEL_LEN]
    with pytest.raises(ValueError, match=r"'input_lengths'\[1\]=48 leaves no room"):
        engines.generate(prompts_of(tokenizer, ["a", "a" * MAX_MODEL_LEN]))


def test_a_token_that_the_model_lacks_is_refused(engines, tokenizer):
    prompts = prompts_of(tokenizer, TEXTS)
    prompts["input_ids"][0, 0] = len(tokenizer)
    with pytest.raises(ValueError, match=f"holds the token {len(tokenizer)}: the model has"):
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
        engines.wait(engines.update(3))
    with pytest.raises(RuntimeError, match="Weight transfer not configured"):
        engines.begin_update(3)
    with pytest.raises(EngineStateError, match="the refit to version 3 failed"):
        engines.generate(prompts_of(tokenizer, TEXTS))
