import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_batched_data import SequenceCost
from rl_batched_data.sharding import SequencePacking, plan_packed_shards

EXAMPLE = [46, 24, 55, 88, 11, 14, 73, 17]


def test_the_worked_example():
    options = SequencePacking(max_tokens_per_microbatch=100)
    plans = plan_packed_shards(EXAMPLE, options, shards=2)
    assert [plan.rows for plan in plans] == [[3, 4, 2, 7, 1], [6, 5, 0]]
    assert [plan.micro_batch_indices for plan in plans] == [[[[0, 2], [2, 5]]], [[[0, 2], [2, 3]]]]
    assert [plan.micro_batch_lengths for plan in plans] == [[[99, 96]], [[87, 46]]]
    assert [plan.elem_counts_per_gb for plan in plans] == [[5], [3]]


def test_padded_lengths_are_packed():
    options = SequencePacking(max_tokens_per_microbatch=32, sequence_length_pad_multiple=8)
    (plan,) = plan_packed_shards([8, 16, 8, 24], options, shards=1)
    assert (plan.rows, plan.micro_batch_lengths) == ([3, 0, 1, 2], [[32, 24]])


def test_equal_sequences_fill_their_micro_batches():
    options = SequencePacking(max_tokens_per_microbatch=1024)
    plans = plan_packed_shards([256] * 16, options, shards=2)
    assert [plan.micro_batch_lengths for plan in plans] == [[[1024, 1024]]] * 2
    plans = plan_packed_shards([900, 850, 1000, 950], options, shards=2)
    assert sorted(length for plan in plans for length in plan.micro_batch_lengths[0]) == [
        850,
        900,
        950,
        1000,
    ]


@pytest.mark.parametrize("algorithm", ["modified_first_fit_decreasing", "cost_balanced"])
@settings(max_examples=1000, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 10), max_size=50),
    shards=st.integers(1, 6),
    batch_size=st.none() | st.integers(1, 30),
    multiple=st.sampled_from([1, 4]),
)
def test_every_row_once_within_capacity_and_equally_many_micro_batches(
    algorithm, lengths, shards, batch_size, multiple
):
    lengths = [length * multiple for length in lengths]
    options = SequencePacking(
        max_tokens_per_microbatch=50,
        algorithm=algorithm,
        sequence_length_pad_multiple=multiple,
        cost=SequenceCost(per_token=1, per_token_squared=0.1),
    )
    plans = plan_packed_shards(lengths, options, shards=shards, batch_size=batch_size)
    assert sorted(row for plan in plans for row in plan.rows) == list(range(len(lengths)))
    assert len({tuple(map(len, plan.micro_batch_indices)) for plan in plans}) == 1
    for plan in plans:
        first = 0
        for count, indices, sums in zip(
            plan.elem_counts_per_gb,
            plan.micro_batch_indices,
            plan.micro_batch_lengths,
            strict=True,
        ):
            for (low, high), tokens in zip(indices, sums, strict=True):
                own = sum(lengths[row] for row in plan.rows[first + low : first + high])
                assert own <= tokens <= 50
                assert tokens % multiple == 0
                assert tokens == max(own, multiple)
            first += count


@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=50), shards=st.integers(1, 6))
def test_no_micro_batch_is_empty_where_there_are_enough_sequences(lengths, shards):
    options = SequencePacking(max_tokens_per_microbatch=12)
    plans = plan_packed_shards(lengths, options, shards=shards)
    sizes = [high - low for plan in plans for low, high in plan.micro_batch_indices[0]]
    assert all(sizes) or len(lengths) < len(sizes)


def test_a_sequence_over_capacity_is_named():
    options = SequencePacking(max_tokens_per_microbatch=100)
    message = r"'input_lengths': rows 1 to 1 have 101 tokens.* max_tokens_per_microbatch=100"
    with pytest.raises(ValueError, match=message):
        plan_packed_shards([5, 101], options, shards=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens_per_microbatch": -1}, "max_tokens_per_microbatch=-1 must be at least 1"),
        (
            {"max_tokens_per_microbatch": 8, "sequence_length_pad_multiple": 0},
            "sequence_length_pad_multiple=0 must be at least 1",
        ),
        (
            {"max_tokens_per_microbatch": 8, "sequence_length_pad_multiple": 16},
            "sequence_length_pad_multiple=16 is more than max_tokens_per_microbatch=8",
        ),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SequencePacking(**options)
