import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_batched_data.sharding import balanced_bounds, plan_shards

pytestmark = pytest.mark.promise

sizes = st.integers(min_value=1, max_value=12)


@given(num_rows=st.integers(0, 60), shards=sizes, batch_size=st.none() | sizes)
def test_uneven_plans_hold_every_row_once_and_balance_every_global_batch(
    num_rows, shards, batch_size
):
    plans = plan_shards(num_rows, shards=shards, batch_size=batch_size, allow_uneven_shards=True)
    assert sorted(row for plan in plans for row in plan.rows) == list(range(num_rows))
    per_batch = list(zip(*(plan.elem_counts_per_gb for plan in plans), strict=True))
    assert len(per_batch) == (1 if batch_size is None else -(-num_rows // batch_size))
    assert all(max(counts) - min(counts) <= 1 for counts in per_batch)
    for plan in plans:
        assert sum(plan.elem_counts_per_gb) == len(plan.rows)
        assert plan.rows == sorted(plan.rows)


@given(shards=sizes, share=sizes, batches=st.integers(1, 5))
def test_an_uneven_plan_of_rows_that_divide_is_the_even_one(shards, share, batches):
    arguments = {"shards": shards, "batch_size": shards * share}
    num_rows = shards * share * batches
    even = plan_shards(num_rows, **arguments)
    assert even == plan_shards(num_rows, **arguments, allow_uneven_shards=True)
    assert {len(plan.rows) for plan in even} == {share * batches}


@pytest.mark.parametrize(
    ("num_rows", "shards", "expected"),
    [(9, 8, [2, 1, 1, 1, 1, 1, 1, 1]), (5, 4, [2, 1, 1, 1]), (2, 3, [1, 1, 0])],
)
def test_uneven_shards_are_balanced(num_rows, shards, expected):
    plans = plan_shards(num_rows, shards=shards, allow_uneven_shards=True)
    assert [len(plan.rows) for plan in plans] == expected


def test_the_last_global_batch_is_shared_out_too():
    plans = plan_shards(10, shards=4, batch_size=8, allow_uneven_shards=True)
    assert [plan.rows for plan in plans] == [[0, 1, 8], [2, 3, 9], [4, 5], [6, 7]]
    assert [plan.elem_counts_per_gb for plan in plans] == [[2, 1], [2, 1], [2, 0], [2, 0]]


@pytest.mark.parametrize(
    ("num_rows", "arguments", "message"),
    [
        (10, {"shards": 2, "batch_size": 4}, "10 rows are not a multiple of batch_size=4"),
        (9, {"shards": 3, "batch_size": None, "allow_uneven_shards": False}, None),
        (9, {"shards": 2}, "batch_size=9 is not a multiple of shards=2"),
        (8, {"shards": 3, "batch_size": 4}, "batch_size=4 is not a multiple of shards=3"),
        (8, {"shards": 0}, "shards=0 must be at least 1"),
        (8, {"shards": 1, "batch_size": 0}, "batch_size=0 must be at least 1"),
    ],
)
def test_numbers_that_do_not_divide_are_named(num_rows, arguments, message):
    if message is None:
        assert plan_shards(num_rows, **arguments)
        return
    with pytest.raises(ValueError, match=message):
        plan_shards(num_rows, **arguments)


def test_bounds_start_where_they_are_told():
    assert balanced_bounds(3, 8, parts=3) == [(3, 5), (5, 7), (7, 8)]
