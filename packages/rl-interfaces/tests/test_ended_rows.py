"""Rows that have ended leave the decoder, and the others go on as if they were alone."""

from types import SimpleNamespace

import pytest
import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces.backend.generation import FullForwardDecoder, SamplingConfig, generate

pytestmark = pytest.mark.needs("rl-interfaces[backend]")

END, PAD, VOCAB = 1, 0, 60
SAMPLING = SamplingConfig(
    max_new_tokens=20,
    temperature=1.0,
    top_p=1.0,
    top_k=None,
    stop_token_ids=(),
    stop_strings=(),
    pad_token_id=PAD,
    batch_size=16,
)
TOKENIZER = SimpleNamespace(eos_token_id=END, pad_token_id=PAD)


class Counting:
    """A model whose next token is the last one less 3, and the end below 3; counts its rows."""

    def __init__(self):
        self.rows = []

    def __call__(self, tokens):
        self.rows.append(len(tokens))
        following = torch.where(tokens < 3, END, tokens - 3)
        return torch.nn.functional.one_hot(following, VOCAB).float() * 9 + tokens[..., None] / 100


def completed(prompts, *, model):
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(each) for each in prompts], True)
    return generate(
        lambda _: FullForwardDecoder(model),
        BatchedDataDict({"input_ids": ids, "input_lengths": lengths}),
        sampling=SAMPLING,
        greedy=True,
        tokenizer=TOKENIZER,
        end_token_ids=[END],
        num_token_ids=None,
        generator=torch.Generator(),
        max_total_length=64,
        device=torch.device("cpu"),
    )


def test_rows_end_as_they_do_alone():
    prompts = [[5, 40], [30], [7, 7, 4], [50], [9], [2], [6, 59], [22, 3]]
    model = Counting()
    together = completed(prompts, model=model)
    for row, prompt in enumerate(prompts):
        alone = completed([prompt], model=Counting())
        length = int(alone["unpadded_sequence_lengths"][0])
        assert int(together["unpadded_sequence_lengths"][row]) == length
        assert together["output_ids"][row, :length].equal(alone["output_ids"][0, :length])
        assert (together["output_ids"][row, length:] == PAD).all()
        torch.testing.assert_close(together["logprobs"][row, :length], alone["logprobs"][0])
        assert (together["logprobs"][row, length:] == 0).all()


def test_the_decoder_has_few_rows_that_have_ended():
    prompts = [[3 * tokens + 2] for tokens in range(16)]
    model = Counting()
    completed(prompts, model=model)
    running = [16 - step for step in range(16)]
    assert len(model.rows) == len(running)
    assert all(now <= rows <= now * 8 / 7 for rows, now in zip(model.rows, running, strict=True))
    assert model.rows[-1] == 1
