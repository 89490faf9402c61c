"""Stop strings are found as in the whole text, from the last tokens alone."""

import random

import pytest
import torch
from rl_interfaces.backend.generation import _ends_in_string
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

RANDOM_RUNS, NUM_TOKENS = 40, 60
LENGTH = 512


def byte_level():
    """Every byte is a token: most characters beyond ASCII are several."""
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
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
    """Two of three tokens decode to nothing."""
    tokenizer = Tokenizer(models.WordLevel({"": 0, "▁": 1, "x": 2}, unk_token=""))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", ""), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


KINDS = {
    byte_level: ["é", "日本", "a\n", "ab", "zz"],
    word_pieces: ["undo", " do", "ing.", "##", "b"],
    with_empty_tokens: ["x", "xx", "xxxx"],
}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_row_stops_with_the_token_that_completes_a_stop_string(make):
    tokenizer, draw = make(), random.Random(0)
    size = len(tokenizer)
    stops_found = 0
    for _ in range(RANDOM_RUNS):
        strings = [tuple(draw.sample(KINDS[make], draw.randint(0, 3))) for _ in range(4)]
        # A few tokens only, so that strings of several of them occur.
        tokens = draw.sample(range(size), min(size, 6))
        stops = [piece for texts in strings for text in texts for piece in text]
        tokens += [i for i in tokenizer.convert_tokens_to_ids(stops) if i is not None]
        columns, running = [], torch.ones(4, dtype=torch.bool)
        for _ in range(NUM_TOKENS):
            columns.append(torch.tensor([draw.choice(tokens) for _ in range(4)]))
            found = _ends_in_string(columns, strings, tokenizer, running=running)
            texts = tokenizer.batch_decode(torch.stack(columns, dim=1).tolist())
            whole = [any(s in text for s in own) for own, text in zip(strings, texts, strict=True)]
            assert found.tolist() == [a and b for a, b in zip(whole, running.tolist(), strict=True)]
            running &= ~found
        stops_found += int((~running).sum())
    assert stops_found > RANDOM_RUNS // 4


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
    (token,) = tokenizer.convert_tokens_to_ids(["a"])
    for _ in range(length):
        columns.append(torch.tensor([token]))
        assert not _ends_in_string(columns, [("stop",)], tokenizer, running=running).any()
    tokenizer.batch_decode = plain
    return total
