import pytest
import torch
from rl_policy.config import TinyModelSection
from rl_policy.data.tiny_model import (
    END,
    PAD,
    build_tiny_model,
    build_tokenizer,
    tiny_model_config,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

CONFIG = tiny_model_config(TinyModelSection(), max_sequence_length=32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny_model(path, config=CONFIG, seed=3)
    return path


@pytest.mark.parametrize("text", ["27+35=62", "  two words\n", "\u00fc\u4e16", f"5{END}"])
def test_the_tokenizer_is_the_same_after_loading_and_loses_nothing(directory, text):
    loaded = AutoTokenizer.from_pretrained(directory)
    tokens = loaded(text)["input_ids"]
    assert tokens == build_tokenizer()(text)["input_ids"]
    assert loaded.decode(tokens) == text


def test_an_ascii_character_is_a_token_and_the_special_tokens_are_known(directory):
    loaded = AutoTokenizer.from_pretrained(directory)
    assert len(loaded("27+35=")["input_ids"]) == 6
    assert (loaded.pad_token, loaded.eos_token) == (PAD, END)
    assert loaded.pad_token_id != loaded.eos_token_id


def test_the_model_loads_with_transformers_alone_and_fits_its_tokenizer(directory):
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(directory))
    assert model.config.hidden_size // model.config.num_attention_heads >= 32
    assert model.dtype == torch.float32
    assert model(torch.tensor([[2, 3, 4]])).logits.shape == (1, 3, model.config.vocab_size)


def test_the_seed_alone_decides_the_weights(directory, tmp_path):
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    for seed in (3, 4):
        build_tiny_model(tmp_path / str(seed), config=CONFIG, seed=seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    first, same, other = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (directory, tmp_path / "3", tmp_path / "4")
    )
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
