import pytest
import scoring_ranks
import torch
from oracle import load, plain_logprobs
from rank_pool import RankFailure
from tiny_model import make_batch, make_config
from tolerances import assert_close

pytestmark = pytest.mark.promise


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_plain_transformers(pools, tiny_model, num_ranks, num_rows, temperature):
    batch = make_batch(num_rows)
    generation = {"max_new_tokens": 8, "temperature": temperature}
    config = make_config(tiny_model, generation=generation)
    parts = pools(num_ranks).run(scoring_ranks.score, config=config, batch=batch)
    scores = torch.cat(parts)
    expected = plain_logprobs(load(tiny_model), batch, temperature=temperature)
    assert scores.dtype is torch.float32
    assert scores.shape == batch["input_ids"].shape
    assert_close(scores, expected)
    assert torch.all(scores[:, 0] == 0)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        assert torch.all(scores[row, length:] == 0)
        assert torch.all(scores[row, 1:length] < 0)


def test_logprobs_do_not_depend_on_micro_batches_or_width_multiple(pools, tiny_model):
    batch = make_batch(5)
    expected = plain_logprobs(load(tiny_model), batch)
    for micro_batch_size, multiple in ((1, 1), (2, 8), (5, 5)):
        config = make_config(tiny_model, make_sequence_length_divisible_by=multiple)
        (scores,) = pools(1).run(
            scoring_ranks.score, config=config, batch=batch, micro_batch_size=micro_batch_size
        )
        assert_close(scores, expected)


def test_bfloat16_logprobs_are_near_float32(pools, tiny_model):
    batch = make_batch(6)
    config = make_config(tiny_model, precision="bfloat16")
    (scores,) = pools(1).run(scoring_ranks.score, config=config, batch=batch)
    expected = plain_logprobs(load(tiny_model), batch, dtype=torch.bfloat16)
    assert scores.dtype is torch.float32
    assert_close(scores, expected)
    assert (scores - expected.exact).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.pop("input_lengths"), ["'input_lengths' is missing"]),
        (lambda b: b.update(input_ids=b["input_ids"][0]), ["input_ids", "[12]", "2 axes"]),
        (lambda b: b.update(attention_mask=(b["input_ids"] > 0).flip(1)), ["'attention_mask'[0]"]),
        (lambda b: b["input_ids"].__setitem__((2, 1), 64), ["'input_ids'[2, 1]=64", "64 tokens"]),
    ],
)
def test_bad_input_is_named(pools, tiny_model, change, words):
    batch = make_batch(4)
    batch["input_lengths"] = torch.tensor([5, 6, 7, 8])
    batch["input_ids"] = torch.where(torch.arange(12) < batch["input_lengths"][:, None], 9, 0)
    change(batch)
    with pytest.raises(RankFailure) as failure:
        pools(1).run(scoring_ranks.score_as_given, config=make_config(tiny_model), batch=batch)
    assert failure.value.kind == "ValueError"
    assert all(word in failure.value.text for word in words)
