import pytest
import scoring_ranks
import torch
from oracle import load, plain_logprobs
from rank_pool import RankFailure
from rl_interfaces.backend.generation import truncate_logits
from tiny_model import EOS, PAD, build_tokenizer, make_batch, make_config
from tolerances import LOGPROBS, assert_close, expected_of


def _config(model, **generation):
    return make_config(model, generation={"max_new_tokens": 8, "temperature": 1.0} | generation)


def _gather(results, key):
    parts = [result.outputs[-1][key] for result in results]
    if parts[0].ndim == 1:
        return torch.cat(parts)
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[1])) for p in parts])


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.promise
def test_greedy_equals_transformers_on_ragged_prompts(pools, tiny_model, num_ranks):
    batch = make_batch(5)
    config = make_config(tiny_model, generation_batch_size=2)
    results = pools(num_ranks).run(scoring_ranks.generate, config=config, batch=batch, greedy=True)
    output_ids, totals = (
        _gather(results, "output_ids"),
        _gather(results, "unpadded_sequence_lengths"),
    )
    model = load(tiny_model)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        expected = model.generate(
            batch["input_ids"][row : row + 1, :length], do_sample=False, max_new_tokens=8
        )[0]
        assert output_ids[row, : totals[row]].tolist() == expected.tolist()
        assert torch.all(output_ids[row, totals[row] :] == PAD)
    lengths = _gather(results, "generation_lengths")
    assert torch.equal(lengths, totals - batch["input_lengths"])


def test_rows_of_a_group_share_a_prefill(pools, tiny_model):
    batch = make_batch(3).select_indices(torch.tensor([0, 1, 1, 2, 0]))
    config = make_config(tiny_model, generation_batch_size=5)
    (result,) = pools(1).run(scoring_ranks.generate_counting_tokens, config=config, batch=batch)
    output_ids, totals = result.output_ids, result.totals
    lengths = batch["input_lengths"].tolist()
    # Three prompts of the five rows, then each row's next token.
    assert result.num_tokens[:2] == [3 * max(lengths), 5]
    model = load(tiny_model)
    for row, length in enumerate(lengths):
        expected = model.generate(
            batch["input_ids"][row : row + 1, :length], do_sample=False, max_new_tokens=8
        )[0]
        assert output_ids[row, : totals[row]].tolist() == expected.tolist()


@pytest.mark.promise
def test_sampled_logprobs_are_those_of_the_policy(pools, tiny_model):
    batch = make_batch(12)
    # A third of the tokens end a row, so that rows leave the cache while others go on.
    config = _config(tiny_model, temperature=0.7, stop_token_ids=[*range(0, 66, 3)])
    for result in pools(2).run(scoring_ranks.generate, config=config, batch=batch):
        output = result.outputs[-1]
        position = torch.arange(output["output_ids"].shape[1])
        total = output["unpadded_sequence_lengths"][:, None]
        start = total - output["generation_lengths"][:, None]
        generated = (position >= start) & (position < total)
        rows = {"input_ids": output["output_ids"], "input_lengths": total[:, 0]}
        expected = plain_logprobs(load(tiny_model), rows, temperature=0.7)[generated]
        assert_close(output["logprobs"][generated], expected)
        assert_close(result.scored[generated], expected)
        assert torch.all(output["logprobs"][~generated] == 0)
        assert torch.all(output["logprobs"][generated] < 0)


def test_truncated_logprobs_are_those_of_the_truncated_distribution(pools, tiny_model):
    batch = make_batch(4)
    config = _config(tiny_model, temperature=1.3, top_k=5, top_p=0.8, max_new_tokens=4)
    (result,) = pools(1).run(scoring_ranks.generate, config=config, batch=batch)
    output, model = result.outputs[-1], load(tiny_model)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        total = int(output["unpadded_sequence_lengths"][row])
        tokens = output["output_ids"][row : row + 1, :total]

        def compute(model, tokens=tokens, length=length, total=total):
            logits = model(tokens).logits[0, length - 1 : total - 1] / 1.3
            kept = truncate_logits(logits, top_k=5, top_p=0.8).log_softmax(-1)
            return kept.gather(-1, tokens[0, length:, None]).squeeze(-1)

        expected = expected_of(compute, model, LOGPROBS)
        assert torch.isfinite(expected.exact).all()
        assert_close(output["logprobs"][row, length:total], expected)


def test_the_seed_decides_and_ranks_differ(pools, tiny_model):
    batch = make_batch(4)
    same_rows = type(batch)({k: torch.cat([v, v]) for k, v in batch.items()})
    runs = [
        pools(2).run(
            scoring_ranks.generate,
            config=make_config(tiny_model, seed=seed),
            batch=same_rows,
            num_calls=2,
        )
        for seed in (5, 5, 6)
    ]
    ids = [[[call["output_ids"] for call in rank.outputs] for rank in run] for run in runs]
    assert all(
        torch.equal(ids[0][rank][call], ids[1][rank][call]) for rank in (0, 1) for call in (0, 1)
    )
    assert not _same(ids[0][0][0], ids[2][0][0])
    assert not _same(ids[0][0][0], ids[0][0][1])  # the next call draws anew
    assert not _same(ids[0][0][0], ids[0][1][0])  # and so does another rank


def _same(left, right):
    return left.shape == right.shape and torch.equal(left, right)


def test_rows_stop_at_tokens_strings_and_the_longest_length(pools, tiny_model):
    batch = make_batch(8)
    (free,) = pools(1).run(
        scoring_ranks.generate, config=_config(tiny_model), batch=batch, greedy=True
    )
    output = free.outputs[-1]
    row = int(output["generation_lengths"].argmax())
    start, length = int(batch["input_lengths"][row]), int(output["generation_lengths"][row])
    assert length >= 4
    stop = int(output["output_ids"][row, start + 2])
    first = output["output_ids"][row, start : start + length].tolist().index(stop)
    text = build_tokenizer().decode([stop])
    for generation in ({"stop_token_ids": [stop]}, {"stop_strings": [text]}):
        config = _config(tiny_model, **generation)
        (result,) = pools(1).run(scoring_ranks.generate, config=config, batch=batch, greedy=True)
        stopped = result.outputs[-1]
        assert int(stopped["generation_lengths"][row]) == first + 1
        assert int(stopped["output_ids"][row, start + first]) == stop
    config = _config(tiny_model)
    config["max_total_sequence_length"] = 14
    (result,) = pools(1).run(scoring_ranks.generate, config=config, batch=batch, greedy=True)
    assert int(result.outputs[-1]["unpadded_sequence_lengths"].max()) == 14


def test_rows_end_with_their_end_token(pools, tiny_model):
    batch = make_batch(32)
    config = _config(tiny_model, temperature=2.0, max_new_tokens=30)
    (result,) = pools(1).run(scoring_ranks.generate, config=config, batch=batch)
    output = result.outputs[-1]
    ids, totals = output["output_ids"], output["unpadded_sequence_lengths"]
    ended = 0
    for row, length in enumerate(batch["input_lengths"].tolist()):
        completion = ids[row, length : totals[row]].tolist()
        assert EOS not in completion[:-1]
        ended += completion[-1] == EOS
        assert completion[-1] == EOS or len(completion) == 30
    assert ended > 0


@pytest.mark.parametrize(
    ("generation", "longest", "words"),
    [(None, 40, ["policy.generation is not set"]), ({}, 11, ["input_lengths", "11"])],
)
def test_what_cannot_be_generated_is_named(pools, tiny_model, generation, longest, words):
    config = make_config(tiny_model, max_total_sequence_length=longest)
    config["generation"] = None if generation is None else {"max_new_tokens": 4}
    with pytest.raises(RankFailure) as failure:
        pools(1).run(scoring_ranks.generate, config=config, batch=make_batch(8))
    assert failure.value.kind == "ValueError"
    assert all(word in failure.value.text for word in words)
