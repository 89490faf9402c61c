import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_batched_data import BatchedDataDict
from rl_interfaces import LossType, resolve_policy_config
from rl_policy import dispatch

pytestmark = pytest.mark.promise

PAD = 0


class TokenLoss:
    loss_type = LossType.TOKEN_LEVEL


class SequenceLoss:
    loss_type = LossType.SEQUENCE_LEVEL


def batch(lengths, *, width=None, masks=True):
    """Return rows whose tokens are all unlike one another, so that a mix-up shows."""
    width = max(lengths) if width is None else width
    ids = torch.arange(1, 1 + len(lengths) * width).reshape(len(lengths), width)
    positions = torch.arange(width)
    valid = positions < torch.tensor(lengths)[:, None]
    data = {"input_ids": ids * valid, "input_lengths": torch.tensor(lengths)}
    if masks:
        data |= {
            "sample_mask": torch.ones(len(lengths)),
            "token_mask": (valid & (positions > 0)).long(),
        }
    return BatchedDataDict(data)


def dispatcher(*, ranks=1, **config):
    """Return the dispatcher of a policy with such a config."""
    config = resolve_policy_config({"model_name": "any", **config})
    return dispatch.Dispatcher(config, data_parallel=ranks)


def check(data, loss=None, *, max_length=None):
    sharder = dispatcher(train_global_batch_size=4, max_total_sequence_length=max_length)
    if loss is None:
        sharder.plan_scoring(data)
    else:
        sharder.plan_training(data, loss)


def applied(data, plans):
    """Return the shards of the plans."""
    return [data.apply_plan(plan) for plan in plans]


class PairLoss:
    loss_type = LossType.SEQUENCE_LEVEL
    rows_per_group = 2


@given(rows=st.integers(1, 40), ranks=st.integers(1, 8))
def test_scores_come_back_in_the_callers_order_and_count(rows, ranks):
    data = batch([1 + row % 5 for row in range(rows)])
    shards = applied(data, dispatch.plan_in_order(data, data_parallel=ranks))
    sizes = [shard.size for shard in shards]
    assert len(shards) == ranks
    assert max(sizes) - min(sizes) <= 1
    parts = [{"logprobs": shard["input_ids"].float()} for shard in shards]
    gathered = dispatch.gather_scores(parts, width=data["input_ids"].shape[1])
    assert torch.equal(gathered["logprobs"], data["input_ids"].float())


@given(
    rows=st.integers(1, 40),
    ranks=st.integers(1, 4),
    section=st.sampled_from(["dynamic_batching", "sequence_packing"]),
)
def test_planned_scores_come_back_in_the_callers_order(rows, ranks, section):
    data = batch([1 + (7 * row) % 5 for row in range(rows)])
    data["row"] = torch.arange(rows)
    budgets = {"enabled": True, "train_mb_tokens": 1, "logprob_mb_tokens": 128}
    plans, order = dispatcher(ranks=ranks, **{section: budgets}).plan_scoring(data)
    shards = applied(data, plans)
    assert len(shards) == ranks
    parts = [{"logprobs": shard["row"][:, None].float()} for shard in shards]
    gathered = dispatch.gather_scores(parts, width=5, order=order)
    assert gathered["logprobs"][:, 0].tolist() == list(range(rows))


@pytest.mark.parametrize(
    ("section", "arguments"),
    [
        ("dynamic_batching", {"sequence_length_round": 64}),
        (
            "sequence_packing",
            {"algorithm": "modified_first_fit_decreasing", "sequence_length_pad_multiple": 8},
        ),
    ],
)
def test_the_section_becomes_the_arguments(section, arguments):
    config = resolve_policy_config(
        {
            "model_name": "any",
            "make_sequence_length_divisible_by": 8,
            section: {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 64},
        }
    )
    for budget, tokens in (("train_mb_tokens", 32), ("logprob_mb_tokens", 64)):
        planned = dispatch.TokenBudget.from_config(config, budget)
        expected = {"max_tokens_per_microbatch": tokens, **arguments}
        assert getattr(planned, f"{section}_args") == expected
        assert planned.key == f"policy.{section}.{budget}"
    assert (
        dispatch.TokenBudget.from_config(resolve_policy_config({"model_name": "any"}), budget)
        is None
    )


@given(rows=st.integers(1, 40), ranks=st.integers(1, 4), multiple=st.integers(1, 4))
def test_every_global_batch_is_shared_out_whole(rows, ranks, multiple):
    gbs = ranks * multiple
    data = batch([3] * rows)
    plans, size = dispatcher(ranks=ranks).plan_training(data, TokenLoss(), gbs=gbs)
    shards = applied(data, plans)
    assert size == gbs
    first_tokens = data["input_ids"][:, 0].tolist()
    counts = np.array([shard.elem_counts_per_gb for shard in shards])
    steps = -(-rows // gbs)
    assert counts.shape == (ranks, steps)
    for step in range(steps):
        starts = counts[:, :step].sum(axis=1)
        got = [
            token
            for shard, start, count in zip(shards, starts, counts[:, step], strict=True)
            for token in shard["input_ids"][start : start + count, 0].tolist()
        ]
        assert got == first_tokens[step * gbs : (step + 1) * gbs]
    assert (counts[:, :-1] == multiple).all()
    assert counts[:, -1].max() - counts[:, -1].min() <= 1


def test_narrow_scores_are_widened_to_the_callers_width():
    parts = [{"logprobs": torch.ones(1, 2)}, {"logprobs": torch.ones(2, 3)}]
    gathered = dispatch.gather_scores(parts, width=5)["logprobs"]
    expected = [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    assert gathered.tolist() == expected


def test_gathered_scores_own_their_memory():
    # What a rank returned may be memory that other processes read.
    part = torch.zeros(2, 3)
    dispatch.gather_scores([{"logprobs": part}], width=3)["logprobs"].fill_(7)
    assert part.sum() == 0


def test_completions_are_padded_to_the_widest():
    parts = [
        {"output_ids": torch.tensor([[5, 6]]), "logprobs": torch.tensor([[0.0, -0.5]])},
        {"output_ids": torch.tensor([[5, 6, 7]]), "logprobs": torch.tensor([[0.0, -0.5, -1.0]])},
    ]
    gathered = dispatch.gather_generations(parts, pad_token_id=9)
    assert gathered["output_ids"].tolist() == [[5, 6, 9], [5, 6, 7]]
    assert gathered["logprobs"].tolist() == [[0.0, -0.5, 0.0], [0.0, -0.5, -1.0]]


def test_metrics_of_all_ranks_follow_one_another():
    results = [
        {
            "global_loss": torch.tensor([2.5, 1.5]),
            "grad_norm": torch.tensor([0.5, 0.25]),
            "all_mb_metrics": metrics,
        }
        for metrics in ({"lr": [1.0], "kl": [0.1]}, {"lr": [1.0, 1.0]}, {})
    ]
    merged = dispatch.merge_train_results(results)
    assert merged["loss"].tolist() == [2.5, 1.5]
    assert merged["loss"].dtype == merged["grad_norm"].dtype == torch.float32
    assert merged["grad_norm"].tolist() == [0.5, 0.25]
    assert merged["all_mb_metrics"] == {"lr": [1.0, 1.0, 1.0], "kl": [0.1]}


def test_there_is_no_gradient_norm_in_eval_mode():
    result = {"global_loss": [1.0], "grad_norm": None, "all_mb_metrics": {}}
    merged = dispatch.merge_train_results([result])
    assert merged["grad_norm"] is None
    assert merged["loss"].tolist() == [1.0]


def test_a_good_batch_passes():
    check(batch([3, 1, 2]), TokenLoss(), max_length=3)
    sequences = batch([3, 1, 2])
    del sequences["token_mask"]
    check(sequences, SequenceLoss())


def test_a_missing_key_is_named():
    for key, message in [
        ("input_ids", "'input_ids' is missing"),
        ("input_lengths", "'input_lengths' is missing"),
        ("sample_mask", "'sample_mask' is missing"),
        ("token_mask", "'token_mask' is missing, which a token-level loss needs"),
    ]:
        data = batch([3, 1])
        del data[key]
        with pytest.raises(ValueError, match=message):
            check(data, TokenLoss())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sample_mask", torch.ones(2, 1), r"'sample_mask' has shape \[2, 1\], expected \[2\]"),
        ("token_mask", torch.ones(2, 2), r"'token_mask' has shape \[2, 2\], expected \[2, 3\]"),
        ("advantages", torch.ones(3), "differ in their number of rows: .*'advantages': 3"),
        ("input_lengths", torch.tensor([3, 4]), r"'input_lengths'\[1\]=4 is not within 1..3"),
        ("input_lengths", torch.tensor([0, 3]), r"'input_lengths'\[0\]=0 is not within 1..3"),
    ],
)
def test_shapes_that_disagree_are_named(key, value, message):
    data = batch([3, 2])
    data[key] = value
    with pytest.raises(ValueError, match=message):
        check(data, SequenceLoss())


def test_left_padding_is_named():
    data = batch([3, 3])
    data["input_ids"] = torch.tensor([[4, 5, 6], [PAD, 7, 8]])
    data["input_lengths"] = torch.tensor([3, 2])
    data["attention_mask"] = torch.tensor([[1, 1, 1], [0, 1, 1]])
    with pytest.raises(ValueError, match=r"'attention_mask'\[1\]"):
        check(data)


def test_rows_that_are_too_long_are_named():
    with pytest.raises(
        ValueError,
        match=r"'input_lengths'\[1\]=5 is more than policy.max_total_sequence_length=4",
    ):
        check(batch([3, 5]), max_length=4)
    with pytest.raises(ValueError, match="'input_ids' is 6 tokens wide, padding included: over"):
        check(batch([3, 4], width=6), max_length=4)


def test_prompts_leave_room_for_a_token():
    limited = dispatcher(max_total_sequence_length=4)
    limited.plan_prompts(batch([3, 2]))
    with pytest.raises(ValueError, match=r"'input_lengths'\[1\]=4 leaves no room for a token"):
        limited.plan_prompts(batch([3, 4]))


def test_a_batch_without_rows_is_refused():
    data = BatchedDataDict(
        {"input_ids": torch.zeros(0, 3).long(), "input_lengths": torch.zeros(0).long()}
    )
    with pytest.raises(ValueError, match="no rows"):
        check(data)


@pytest.mark.parametrize(
    ("gbs", "message"),
    [(6, "gbs=6 is not a multiple of data_parallel=4"), (0, "gbs=0 must be positive")],
)
def test_global_batches_divide_over_the_ranks(gbs, message):
    data = batch([2] * 8)
    dispatcher(ranks=4).plan_training(data, TokenLoss(), gbs=8)
    with pytest.raises(ValueError, match=message):
        dispatcher(ranks=4).plan_training(data, TokenLoss(), gbs=gbs)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=20),
    ranks=st.integers(1, 4),
    groups_per_rank=st.integers(1, 3),
    section=st.sampled_from([None, "dynamic_batching", "sequence_packing"]),
)
def test_the_rows_of_a_group_stay_together(lengths, ranks, groups_per_rank, section):
    # Rows 2i and 2i + 1 are a pair.
    data = batch([length for length in lengths for _ in range(2)], width=6)
    data["row"] = torch.arange(data.size)
    budgets = {"enabled": True, "train_mb_tokens": 128, "logprob_mb_tokens": 128}
    planner = dispatcher(
        ranks=ranks,
        train_global_batch_size=2 * ranks * groups_per_rank,
        train_micro_batch_size=2,
        **({} if section is None else {section: budgets}),
    )
    plans, _ = planner.plan_training(data, PairLoss())
    shards = applied(data, plans)
    seen = []
    for shard in shards:
        rows = shard["row"].tolist()
        seen += rows
        assert all(count % 2 == 0 for count in shard.elem_counts_per_gb)
        assert [row // 2 for row in rows[::2]] == [row // 2 for row in rows[1::2]]
        for batch_plan in shard.micro_batch_indices or []:
            assert all(start % 2 == end % 2 == 0 for start, end in batch_plan)
    assert sorted(seen) == list(range(data.size))


@pytest.mark.parametrize(
    ("rows", "sizes", "message"),
    [
        (8, {"gbs": 6}, "gbs=6 is not a multiple of data_parallel=2 x rows_per_group=2"),
        (8, {"gbs": 4, "mbs": 3}, "mbs=3 is not a multiple of rows_per_group=2"),
        (8, {"gbs": 4}, "policy.train_micro_batch_size=1 is not a multiple of rows_per_group=2"),
        (7, {"gbs": 4, "mbs": 2}, "has 7 rows, not a multiple of rows_per_group=2 of PairLoss"),
    ],
)
def test_sizes_that_would_split_a_group_are_named(rows, sizes, message):
    planner = dispatcher(ranks=2, train_micro_batch_size=1)
    with pytest.raises(ValueError, match=message):
        planner.plan_training(batch([2] * rows), PairLoss(), **sizes)
