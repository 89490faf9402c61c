"""From a batch to requests, and from completions to a batch. No vLLM here."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rl_policy.data.batches import completion_batch
from rl_policy.generation.vllm.config import parse_sampling_config
from rl_policy.generation.vllm.requests import (
    Completion,
    assemble_output,
    mean_staleness,
    request_arguments,
    row_seeds,
    unsampled_ids,
)


def requests(lengths=(3,), stop_strings=None, greedy=False, max_length=100, unsampled=(), **config):
    sampling = parse_sampling_config(
        config, SimpleNamespace(pad_token_id=0, eos_token_id=1), batch_size=8
    )
    return request_arguments(
        sampling,
        prompt_lengths=lengths,
        seeds=range(len(lengths)),
        stop_strings=stop_strings or [None] * len(lengths),
        max_length=max_length,
        unsampled=unsampled,
        greedy=greedy,
    )


def test_a_row_may_grow_to_the_longest_that_the_model_takes():
    rows = requests(lengths=(3, 9), max_new_tokens=5, max_length=10)
    assert [row["max_tokens"] for row in rows] == [5, 1]


def test_the_distribution_is_passed_on():
    (row,) = requests(temperature=0.7, top_p=0.9, top_k=5)
    assert (row["temperature"], row["top_p"], row["top_k"]) == (0.7, 0.9, 5)
    (row,) = requests()
    assert (row["temperature"], row["top_p"], row["top_k"]) == (1.0, 1.0, 0)


def test_greedy_rows_are_neither_tempered_nor_truncated():
    for row in requests(temperature=0.7, top_p=0.9, top_k=5, greedy=True) + requests(
        temperature=0.0, top_k=5
    ):
        assert (row["temperature"], row["top_p"], row["top_k"]) == (0.0, 1.0, 0)


def test_stops_of_the_row_come_on_top_of_the_configured_ones():
    sampling = parse_sampling_config(
        {"stop_strings": ["."], "stop_token_ids": [7]},
        SimpleNamespace(pad_token_id=0, eos_token_id=1),
        batch_size=8,
    )
    rows = request_arguments(
        sampling,
        prompt_lengths=[1, 1],
        seeds=[0, 1],
        stop_strings=[["END"], None],
        max_length=9,
        greedy=False,
    )
    assert [row["stop"] for row in rows] == [[".", "END"], ["."]]
    assert rows[0]["stop_token_ids"] == [1, 7]
    assert all(row["include_stop_str_in_output"] for row in rows)


def test_text_is_decoded_only_where_a_stop_string_needs_it():
    rows = requests(lengths=(1, 1), stop_strings=[["END"], None])
    assert [row["detokenize"] for row in rows] == [True, False]


def test_seeds_repeat_for_the_same_numbers_and_for_no_others():
    def seeds(seed=0, weight_version=0, call=0):
        return row_seeds(50, seed=seed, weight_version=weight_version, call=call).tolist()

    assert seeds() == seeds()
    others = [seeds(), seeds(seed=1), seeds(weight_version=1), seeds(call=1)]
    assert len({value for values in others for value in values}) == 200
    assert all(value >= 0 for values in others for value in values)


def test_a_batch_is_padded_behind_each_row():
    output = assemble_output(
        [[1, 2], [3]],
        [
            Completion(token_ids=[4], logprobs=[-0.5], weight_versions=[4], finish_reason="stop"),
            Completion(
                token_ids=[5, 6, 7],
                logprobs=[-0.25, -1.0, -2.0],
                weight_versions=[3, 4, 4],
                finish_reason="length",
            ),
        ],
        pad_token_id=9,
    )
    assert output["output_ids"].tolist() == [[1, 2, 4, 9], [3, 5, 6, 7]]
    assert output["logprobs"].tolist() == [[0, 0, -0.5, 0], [0, -0.25, -1.0, -2.0]]
    assert output["generation_lengths"].tolist() == [1, 3]
    assert output["unpadded_sequence_lengths"].tolist() == [3, 4]
    assert output["weight_version"].tolist() == [4, 3]
    assert output["weight_versions"].tolist() == [[-2, -2, 4, -2], [-2, 3, 4, 4]]


def test_routes_are_those_of_all_tokens_but_the_last():
    def completion(token_ids, routes):
        return Completion(
            token_ids=token_ids,
            logprobs=[-0.5] * len(token_ids),
            weight_versions=[0] * len(token_ids),
            finish_reason="stop",
            routed_experts=None if routes is None else np.array(routes, dtype=np.uint8),
        )

    # One layer with experts, two experts per token.
    output = assemble_output(
        [[1, 2], [3]],
        [completion([4], [[[0, 1]], [[200, 3]]]), completion([5, 6, 7], None)],
        pad_token_id=9,
    )
    routes = output["routed_experts"]
    assert (routes.dtype, tuple(routes.shape)) == (torch.int16, (2, 4, 1, 2))
    assert routes[0, :, 0].tolist() == [[0, 1], [200, 3], [-1, -1], [-1, -1]]
    assert (routes[1] == -1).all()
    batch = completion_batch(output)
    assert torch.equal(batch["routed_experts"], routes)
    plain = assemble_output([[1]], [completion([4], None)], pad_token_id=9)
    assert "routed_experts" not in plain
    assert "routed_experts" not in completion_batch(plain)


def test_staleness_is_a_mean_over_the_tokens_that_were_sampled():
    versions = torch.tensor([[-2, -2, 8], [-2, 8, 9]])
    assert mean_staleness({"weight_versions": versions}, 9) == pytest.approx(2 / 3)
    assert mean_staleness({"weight_versions": torch.full((2, 3), -2)}, 9) == 0
    assert mean_staleness({"logprobs": torch.zeros(2, 3)}, 9) == 0


def test_no_rows_make_an_empty_batch_of_the_same_types():
    output = assemble_output([], [], pad_token_id=9)
    assert output["output_ids"].shape == (0, 0)
    assert {key: value.dtype for key, value in output.items()} == {
        "output_ids": torch.int64,
        "generation_lengths": torch.int64,
        "unpadded_sequence_lengths": torch.int64,
        "logprobs": torch.float32,
        "weight_version": torch.int64,
        "weight_versions": torch.int64,
    }


def test_rows_end_at_every_end_token_of_the_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 3}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    (row,) = requests(model_name=str(tmp_path), stop_token_ids=[9])
    assert row["stop_token_ids"] == [1, 3, 4, 5, 9]


def test_ids_that_the_tokenizer_does_not_have_are_not_sampled(caplog):
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    ids = unsampled_ids(tokenizer, vocab_size=4, engine_kwargs={})
    (row,) = requests(unsampled=ids)
    assert row["logit_bias"] == {2: -100.0, 3: -100.0}
    (row,) = requests(unsampled=unsampled_ids(tokenizer, vocab_size=2, engine_kwargs={}))
    assert row["logit_bias"] is None
    kwargs = {"speculative_config": {"method": "ngram"}}
    assert not unsampled_ids(tokenizer, vocab_size=4, engine_kwargs=kwargs)
    assert "2 of the model's 4 ids" in caplog.text
