import numpy as np
import pytest
from rl_interfaces import ParallelLayout
from rl_policy.ray.worker_group import NamedSharding

AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]


def grid():
    return NamedSharding(np.arange(16).reshape(2, 2, 2, 2), AXES)


def test_coordinates_are_the_digits_of_the_rank():
    # Sizes of two on every axis make the coordinates the binary digits of the rank.
    for rank in range(16):
        digits = [int(digit) for digit in f"{rank:04b}"]
        assert grid().get_worker_coords(rank) == dict(zip(AXES, digits, strict=True))


def test_ranks_come_back_from_their_coordinates():
    for rank in range(16):
        assert grid().get_ranks_by_coord(**grid().get_worker_coords(rank)) == [rank]


def test_axes_left_out_take_every_position():
    assert grid().get_ranks_by_coord() == list(range(16))
    assert grid().get_ranks_by_coord(data_parallel=1) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert grid().get_ranks_by_coord(pipeline_parallel=0, tensor_parallel=1) == [1, 3, 5, 7]


def test_a_layout_need_not_be_in_order():
    sharding = NamedSharding([[3, 1], [0, 2]], ["data_parallel", "tensor_parallel"])
    assert sharding.get_worker_coords(0) == {"data_parallel": 1, "tensor_parallel": 0}
    assert sharding.get_ranks_by_coord(data_parallel=0) == [3, 1]
    assert sharding.shape == {"data_parallel": 2, "tensor_parallel": 2}
    assert (sharding.size, sharding.get_axis_size("tensor_parallel")) == (4, 2)


def test_a_parallel_layout_puts_tensor_innermost():
    layout = ParallelLayout(data_parallel=2, context_parallel=2, tensor_parallel=2)
    coords = NamedSharding.from_layout(layout).get_worker_coords(5)
    # The example of ParallelLayout's own documentation.
    assert [coords[axis] for axis in AXES] == [0, 1, 0, 1]


def test_the_layout_is_copied():
    layout = np.arange(2)
    sharding = NamedSharding(layout, ["data_parallel"])
    layout[0] = 7
    assert sharding.get_ranks_by_coord() == [0, 1]


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ([[0, 1]], ["data_parallel"], "2 dimensions"),
        ([0, 1], ["data_parallel", "tensor_parallel"], "1 dimensions"),
        ([0, 1, 1], ["data_parallel"], r"stand twice in the layout: \[1\]"),
        ([0.0, 1.0], ["data_parallel"], "must hold integers, got float64"),
        ([[0, 1]], ["data_parallel", "data_parallel"], "an axis is named twice"),
    ],
)
def test_layouts_that_make_no_sense_are_refused(layout, names, message):
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, names)


@pytest.mark.parametrize(
    ("coords", "message"),
    [
        ({"expert_parallel": 0}, "'expert_parallel' is not an axis"),
        ({"data_parallel": 2}, "data_parallel=2 is outside the axis, which has size 2"),
        ({"data_parallel": -1}, "data_parallel=-1 is outside"),
    ],
)
def test_unknown_coordinates_are_named(coords, message):
    with pytest.raises(ValueError, match=message):
        grid().get_ranks_by_coord(**coords)


def test_an_unknown_rank_is_named():
    with pytest.raises(ValueError, match="rank 16 is not in the layout of 16 ranks"):
        grid().get_worker_coords(16)
