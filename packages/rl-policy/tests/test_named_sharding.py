import numpy as np
import pytest
from rl_interfaces import ParallelLayout
from rl_policy.ray.sharding import NamedSharding

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


@pytest.mark.parametrize("method", ["get_ranks_by_coord", "get_ranks"])
def test_an_unknown_axis_is_named(method):
    with pytest.raises(ValueError, match="'expert_parallel' is not an axis"):
        getattr(grid(), method)(expert_parallel=0)
    for of_an_axis in (grid().get_axis_index, grid().get_axis_size):
        with pytest.raises(ValueError, match="'expert_parallel' is not an axis"):
            of_an_axis("expert_parallel")


@pytest.mark.parametrize("position", [2, -1])
def test_outside_an_axis_there_is_no_rank(position):
    assert grid().get_ranks_by_coord(data_parallel=position) == []
    with pytest.raises(IndexError, match=f"data_parallel={position} is outside the axis, .* 2"):
        grid().get_ranks(data_parallel=position)


def test_a_part_of_a_grid_is_a_grid():
    part = grid().get_ranks(pipeline_parallel=1, context_parallel=0)
    assert part == NamedSharding([[8, 9], [12, 13]], ["data_parallel", "tensor_parallel"])
    assert part.get_worker_coords(12) == {"data_parallel": 1, "tensor_parallel": 0}
    assert part.get_ranks(data_parallel=0) == NamedSharding([8, 9], ["tensor_parallel"])
    assert part.get_ranks(data_parallel=1, tensor_parallel=1) == 13
    assert grid().get_ranks() == grid()


def test_grids_are_equal_by_axes_and_ranks():
    assert grid() == grid()
    assert grid() != NamedSharding(np.arange(16).reshape(2, 2, 2, 2), AXES[::-1])
    assert grid() != NamedSharding(np.arange(16)[::-1].reshape(2, 2, 2, 2), AXES)
    assert grid() != list(range(16))
    sharding = NamedSharding([[3, 1]], ["data_parallel", "tensor_parallel"])
    assert repr(sharding) == "NamedSharding([[3, 1]], ['data_parallel', 'tensor_parallel'])"
    assert eval(repr(sharding)) == sharding


def test_what_it_holds_is_told_as_copies():
    sharding = grid()
    assert (sharding.ndim, sharding.names) == (4, AXES)
    assert sharding.get_axis_index("context_parallel") == 2
    sharding.layout[:] = 0
    sharding.names.clear()
    assert sharding == grid()


def test_an_unknown_rank_is_named():
    with pytest.raises(ValueError, match="rank 16 is not in the layout of 16 ranks"):
        grid().get_worker_coords(16)
