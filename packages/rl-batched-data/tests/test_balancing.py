import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_batched_data.packing.cost import balance


@settings(max_examples=1000, deadline=None)
@given(
    costs=st.lists(st.integers(0, 1000), max_size=80),
    parts=st.integers(1, 9),
)
def test_every_item_is_in_one_part_and_parts_differ_by_at_most_one_item(costs, parts):
    divided = balance(costs, parts=parts)
    sizes = [len(part) for part in divided]
    assert sorted(index for part in divided for index in part) == list(range(len(costs)))
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


def test_the_worked_example():
    assert balance([8, 7, 6, 5, 4, 3], parts=2) == [[1, 2, 4], [0, 3, 5]]


@pytest.mark.parametrize("count", [512, 5000])
@pytest.mark.parametrize("parts", [2, 8])
def test_sums_are_closer_than_those_of_dealing_out_in_turn(count, parts):
    draw = random.Random(0)
    costs = [draw.lognormvariate(6, 1.5) for _ in range(count)]
    sums = [sum(costs[i] for i in part) for part in balance(costs, parts=parts)]
    order = sorted(range(count), key=costs.__getitem__)
    dealt = [sum(costs[i] for i in order[part::parts]) for part in range(parts)]
    mean = sum(costs) / parts
    assert (max(sums) - mean) / mean < 1e-3 < (max(dealt) - mean) / mean
