"""The end tokens that a model's files declare, and the ids that its tokenizer has."""

import json
from types import SimpleNamespace

import pytest
import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces.backend.end_tokens import end_token_ids, num_token_ids
from rl_interfaces.backend.generation import FullForwardDecoder, SamplingConfig, generate

pytestmark = pytest.mark.needs("rl-interfaces[backend]")

TOKENIZER = SimpleNamespace(eos_token_id=7, pad_token_id=0)


def model_of(path, *, config, generation=None):
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return str(path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": [4, 5]}, (3, 4, 5, 7)),
        ({"eos_token_id": [3, 9]}, {"eos_token_id": 4}, (3, 4, 7, 9)),
        ({"eos_token_id": [3, 9]}, None, (3, 7, 9)),
        ({"eos_token_id": None}, {"eos_token_id": [7]}, (7,)),
        ({"eos_token_id": -1}, {}, (7,)),
        # LlamaConfig's default is 2, which is the end where no file says otherwise.
        ({}, None, (2, 7)),
        ({}, {"eos_token_id": 4}, (4, 7)),
        (
            {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": {"eos_token_id": 8}},
            {"eos_token_id": 1},
            (1, 7, 8, 106),
        ),
    ],
)
def test_every_end_that_the_files_declare_counts(tmp_path, config, generation, expected):
    model = model_of(tmp_path, config=config, generation=generation)
    assert end_token_ids(model, TOKENIZER) == expected


def test_a_model_that_transformers_does_not_know_ends_where_its_tokenizer_does(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9}))
    assert end_token_ids(str(tmp_path), TOKENIZER) == (7,)
    assert end_token_ids(None, TOKENIZER) == (7,)
    assert end_token_ids(None, SimpleNamespace(eos_token_id=None)) == ()


def test_ids_are_counted_up_to_the_last_one():
    vocabulary = {"a": 0, "b": 1, "<added>": 9}
    assert num_token_ids(SimpleNamespace(get_vocab=lambda: vocabulary)) == 10
    assert num_token_ids(TOKENIZER) is None


@pytest.mark.parametrize("greedy", [True, False])
def test_ids_without_text_are_not_sampled_and_take_no_probability(greedy):
    logits = torch.tensor([0.0, 1.0, 0.5, 2.0, 30.0, 40.0])
    sampling = SamplingConfig(
        max_new_tokens=200,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        stop_token_ids=(),
        stop_strings=(),
        pad_token_id=0,
        batch_size=4,
    )
    output = generate(
        lambda _: FullForwardDecoder(lambda tokens: logits.expand(*tokens.shape, 6)),
        BatchedDataDict({"input_ids": torch.tensor([[1]]), "input_lengths": torch.tensor([1])}),
        sampling=sampling,
        greedy=greedy,
        tokenizer=TOKENIZER,
        end_token_ids=[],
        num_token_ids=4,
        generator=torch.Generator().manual_seed(0),
        max_total_length=300,
        device=torch.device("cpu"),
    )
    tokens = output["output_ids"][0, 1:]
    expected = logits[:4].log_softmax(-1)[tokens]
    assert set(tokens.tolist()) == ({3} if greedy else {0, 1, 2, 3})
    torch.testing.assert_close(output["logprobs"][0, 1:], expected)
