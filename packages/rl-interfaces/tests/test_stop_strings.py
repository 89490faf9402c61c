"""Stop strings are found as in the whole text, from the last tokens alone."""

import random

import pytest
import torch
from rl_interfaces.backend.generation import _ends_in_string
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NUM_RUNS, NUM_ROWS, NUM_TOKENS = 30, 4, 60
LENGTH = 512


def byte_level():
    """Every byte is a token: a character beyond ASCII is several."""
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_pieces():
    """Pieces whose text depends on what precedes them."""
    words = ["un", "##do", "##ing", "do", ".", "##", "a", "##b"]
    model = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="a")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def with_empty_tokens():
    """Most tokens decode to nothing."""
    vocabulary = {"x": 0} | {"▁" * count: count for count in range(1, 12)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="▁"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", ""), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


KINDS = {
    byte_level: ["é", "日本語", "a\n", "ab", "zz"],
    word_pieces: ["undo", " do", "ing.", "##", "b"],
    with_empty_tokens: ["x", "xx", "xxxx"],
}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_row_stops_with_the_token_that_completes_a_stop_string(make):
    tokenizer, draw = make(), random.Random(0)
    num_found = 0
    for _ in range(NUM_RUNS):
        strings = [tuple(draw.sample(KINDS[make], draw.randint(0, 2))) for _ in range(NUM_ROWS)]
        rows = [some_tokens(tokenizer, KINDS[make], draw) for _ in range(NUM_ROWS)]
        columns, running = [], torch.ones(NUM_ROWS, dtype=torch.bool)
        for tokens in zip(*rows, strict=True):
            columns.append(torch.tensor(tokens))
            found = _ends_in_string(columns, strings, tokenizer, running=running)
            texts = tokenizer.batch_decode(torch.stack(columns, dim=1).tolist())
            whole = [any(s in text for s in own) for own, text in zip(strings, texts, strict=True)]
            assert found.tolist() == [a and b for a, b in zip(whole, running.tolist(), strict=True)]
            running &= ~found
        num_found += int((~running).sum())
    assert num_found > NUM_RUNS


def some_tokens(tokenizer, stops, draw):
    """Return tokens at random, and here and there those of a stop string or of its beginning."""
    tokens = []
    while len(tokens) < NUM_TOKENS:
        if draw.random() < 0.8:
            tokens.append(draw.randrange(len(tokenizer)))
        else:
            whole = tokenizer(draw.choice(stops))["input_ids"]
            tokens += whole[: draw.randint(1, len(whole))]
    return tokens[:NUM_TOKENS]


def test_decoding_does_not_grow_with_the_completion():
    # The four bytes of the stop string and eight around them; whole completions would be 256.
    assert decoded_tokens(byte_level(), LENGTH) <= 12 * LENGTH


def decoded_tokens(tokenizer, length):
    """Return how many tokens are decoded for a completion of some length."""
    total = 0
    plain = tokenizer.batch_decode

    def counted(rows, **options):
        nonlocal total
        total += sum(len(row) for row in rows)
        return plain(rows, **options)

    tokenizer.batch_decode = counted
    columns, running = [], torch.ones(1, dtype=torch.bool)
    (token,) = tokenizer("a")["input_ids"]
    for _ in range(length):
        columns.append(torch.tensor([token]))
        assert not _ends_in_string(columns, [("stop",)], tokenizer, running=running).any()
    return total
