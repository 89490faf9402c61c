"""Completions against transformers', and their log-probabilities against the worker's own."""

import pytest
import torch
from batches import make_batch, make_config
from parity_checks import assert_greedy_is_that_of_transformers, num_layers_of
from plain_loop import load, plain_logprobs
from tiny_models import build_tiny
from tolerances import assert_close
from worker_ranks import generate_and_score

TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
LAYOUTS = {
    "one": (1, {}),
    "tp2_sp": (2, {TP: 2, "sequence_parallel": True}),
    "pp2_virtual": (2, {PP: 2, "virtual_pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2": (2, {}),
    "tp2_pp2": (4, {TP: 2, PP: 2}),
}


# Windows shorter than a prompt, in all layers but the first.
WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
# One family in every layout, another, whose queries, keys and values have biases, in one.
CASES = [("qwen3", layout) for layout in LAYOUTS] + [("qwen2", "tp2_pp2")]
# Rotary embeddings in each layer, with a factor; interleaved ones of a part of each head.
CASES += [("deepseek_v3", "tp2_sp"), ("glm4", "one")]
# Capped scores and logits; rotary embeddings of layers with windows.
CASES += [("gemma2", "tp2_sp"), ("gemma3_text", "one"), ("olmo3", "tp2_sp")]
# Sinks in the cache; linear attention, whose cache is a state, and full sequences without a cache.
CASES += [("gpt_oss", "tp2_sp"), ("qwen3_next", "tp2_sp"), ("qwen3_next", "cp2")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {
        (kind, num_layers): build_tiny(
            tmp_path_factory.mktemp(kind), kind, tied=True, num_hidden_layers=num_layers, **settings
        )
        for kind, num_layers, settings in [
            ("deepseek_v3", 2, {"rope_parameters": YARN}),
            ("gemma2", 2, {}),
            ("gemma3_text", 2, {}),
            ("glm4", 2, {}),
            ("gpt_oss", 2, {}),
            ("olmo3", 2, {}),
            ("qwen2", 2, {}),
            ("qwen3", 2, WINDOWS),
            ("qwen3", 4, WINDOWS),
            ("qwen3_next", 2, {}),
        ]
    }


@pytest.mark.slow_beyond(2, every=4)
@pytest.mark.parametrize(("kind", "layout"), CASES)
@pytest.mark.promise_first(1)
def test_greedy_completions_are_those_of_transformers(pools, models, kind, layout):
    model, (num_ranks, sizes) = models[kind, num_layers_of(layout)], LAYOUTS[layout]
    # Two rows of a batch of three have one prompt, and so one prefill.
    batch = make_batch(4).select_indices(torch.tensor([0, 1, 1, 2, 3]))
    config = make_config(model, sections={"generation_batch_size": 3}, **sizes)
    results = pools(num_ranks).run(generate_and_score, config=config, batch=batch, greedy=True)
    assert_greedy_is_that_of_transformers(results, batch, model)


@pytest.mark.slow_beyond(2, every=4)
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_sampled_tokens_have_the_log_probabilities_that_scoring_gives(pools, models, kind, layout):
    model, (num_ranks, sizes) = models[kind, num_layers_of(layout)], LAYOUTS[layout]
    # A third of the tokens end a row, so that rows leave the cache while others go on.
    sampling = {"max_new_tokens": 8, "temperature": 1.0, "stop_token_ids": [*range(0, 66, 3)]}
    sections = {"generation_batch_size": 6, "generation": sampling}
    config = make_config(model, sections=sections, **sizes)
    results = pools(num_ranks).run(
        generate_and_score, config=config, batch=make_batch(11), greedy=False
    )
    for result in results:
        is_new = result["logprobs"] != 0
        assert is_new.sum() == result["generation_lengths"].sum()
        rows = {
            "input_ids": result["output_ids"],
            "input_lengths": result["unpadded_sequence_lengths"],
        }
        expected = plain_logprobs(load(model), rows)[is_new]
        for key in ("logprobs", "scored"):
            assert_close(result[key][is_new], expected, key)
        same = [each for each in results if each["place"] == result["place"]]
        assert all(torch.equal(each["output_ids"], result["output_ids"]) for each in same)


EXPERT_LAYOUTS = {
    # Ranks with other rows, and more of them on one than on the other.
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "pp2_ep2": (4, {PP: 2, "expert_model_parallel_size": 2}),
    "tp2_sp_ep2": (
        2,
        {
            TP: 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_expert_parallel_completions_are_those_of_transformers(pools, tmp_path, layout):
    model = build_tiny(tmp_path, "qwen3_moe", num_hidden_layers=2)
    num_ranks, sizes = EXPERT_LAYOUTS[layout]
    batch = make_batch(7)
    config = make_config(model, sections={"generation_batch_size": 3}, **sizes)
    results = pools(num_ranks).run(generate_and_score, config=config, batch=batch, greedy=True)
    assert_greedy_is_that_of_transformers(results, batch, model)
