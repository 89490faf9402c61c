import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_batched_data.columns import round_up
from rl_batched_data.sharding import DynamicBatching, plan_dynamic_shards

EXAMPLE = [2, 8, 4, 16, 28, 32, 2, 32]


def test_the_worked_example():
    options = DynamicBatching(max_tokens_per_microbatch=32, sequence_length_round=4)
    plans = plan_dynamic_shards(EXAMPLE, options, shards=2)
    assert [plan.rows for plan in plans] == [[0, 2, 3, 5], [6, 1, 4, 7]]
    for plan in plans:
        assert plan.micro_batch_indices == [[[0, 2], [2, 3], [3, 4]]]
        assert plan.micro_batch_lengths == [[8, 28, 32]]
        assert plan.elem_counts_per_gb == [4]


def test_each_global_batch_has_micro_batches_of_its_own():
    options = DynamicBatching(max_tokens_per_microbatch=32, sequence_length_round=4)
    plans = plan_dynamic_shards(EXAMPLE, options, shards=2, batch_size=4)
    assert [plan.rows for plan in plans] == [[0, 1, 6, 5], [2, 3, 4, 7]]
    assert plans[0].micro_batch_indices == [[[0, 2]], [[0, 1], [1, 2]]]
    assert plans[0].micro_batch_lengths == [[16], [28, 32]]


@settings(max_examples=2000, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=50),
    shards=st.integers(1, 6),
    batch_size=st.none() | st.integers(1, 30),
    multiple=st.sampled_from([1, 4, 8]),
    budget=st.integers(40, 200),
)
def test_every_row_once_within_the_budget_and_equally_many_micro_batches(
    lengths, shards, batch_size, multiple, budget
):
    options = DynamicBatching(max_tokens_per_microbatch=budget, sequence_length_round=multiple)
    plans = plan_dynamic_shards(lengths, options, shards=shards, batch_size=batch_size)
    assert sorted(row for plan in plans for row in plan.rows) == list(range(len(lengths)))
    assert len({tuple(map(len, plan.micro_batch_indices)) for plan in plans}) == 1
    for plan in plans:
        first = 0
        for count, indices, widths in zip(
            plan.elem_counts_per_gb,
            plan.micro_batch_indices,
            plan.micro_batch_lengths,
            strict=True,
        ):
            rows = plan.rows[first : first + count]
            assert [low for low, _ in indices] == [0, *(high for _, high in indices)][:-1]
            assert [high for _, high in indices][-1:] == [count][: len(indices)]
            empty = [low == high for low, high in indices]
            assert not any(empty) or count < len(indices)
            for (low, high), width in zip(indices, widths, strict=True):
                longest = max((lengths[row] for row in rows[low:high]), default=1)
                assert width % multiple == 0
                assert round_up(longest, multiple) <= width
                assert width * (high - low) <= budget
            first += count


def test_shards_without_a_full_share_halve_a_micro_batch_instead_of_running_an_empty_one():
    options = DynamicBatching(max_tokens_per_microbatch=8)
    plans = plan_dynamic_shards([8, 4, 4, 4, 4], options, shards=2)
    assert [plan.micro_batch_indices for plan in plans] == [[[[0, 1], [1, 2]]], [[[0, 2], [2, 3]]]]
    plans = plan_dynamic_shards([8], options, shards=2)
    assert [plan.micro_batch_indices for plan in plans] == [[[[0, 0]]], [[[0, 1]]]]


def test_a_row_over_the_budget_is_named():
    options = DynamicBatching(max_tokens_per_microbatch=30, sequence_length_round=4)
    message = (
        r"'input_lengths'\[1\] of up to 29 tokens takes 1 x 32, more than max_tokens_per_m.*30"
    )
    with pytest.raises(ValueError, match=message):
        plan_dynamic_shards([4, 29], options, shards=1)
    with pytest.raises(ValueError, match=r"'input_lengths'\[2\] of up to 12 tokens takes 2 x 16"):
        plan_dynamic_shards(
            [4, 12],
            DynamicBatching(max_tokens_per_microbatch=31, sequence_length_round=8),
            shards=1,
            rows_per_unit=2,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch=0 must be at least 1"),
        (
            {"max_tokens_per_microbatch": 8, "sequence_length_round": 0},
            "sequence_length_round=0 must be at least 1",
        ),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DynamicBatching(**options)
