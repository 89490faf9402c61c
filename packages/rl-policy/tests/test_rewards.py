import pytest
import torch
from rl_policy.data.datasets import Problem
from rl_policy.data.datasets import ExactMatch, group_relative_advantages

PROBLEM = Problem("27+35=", "62")
REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 4.0, 6.0, 8.0])


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("62", 1.0),
        (" 62\n", 1.0),
        ("", 0.0),
        ("6", 0.0),
        ("062", 0.0),
        ("62.", 0.0),
        ("62 63 64", 0.0),
        ("52", 0.0),
        ("6<|endoftext|>2", 0.0),
    ],
)
def test_the_whole_completion_is_the_answer(completion, reward):
    assert ExactMatch()([completion], [PROBLEM]) == [reward]


@pytest.mark.parametrize(
    ("pattern", "completion", "reward"),
    [
        (r"= *(-?\d+)", "27 + 35 = 62", 1.0),
        (r"= *(-?\d+)", "62", 0.0),
        (r"= *(-?\d+)", "= 62, or = 63", 0.0),
        (r"= *(-?\d+)", "= 63, no, = 62", 1.0),
        (r"-?\d+", "the answer is 62", 1.0),
        (r"-?\d+", "the answer is 623", 0.0),
        (r"x(\d+)|y", "x62 y", 0.0),
    ],
)
def test_the_last_match_of_the_pattern_is_the_answer(pattern, completion, reward):
    assert ExactMatch(pattern)([completion], [PROBLEM]) == [reward]


def test_each_completion_is_held_against_its_own_problem():
    problems = [PROBLEM, Problem("1+1=", "2"), PROBLEM]
    assert ExactMatch()(["2", "2", "62"], problems) == [0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="longer"):
        ExactMatch()(["62"], problems)


def test_a_broken_pattern_is_named():
    with pytest.raises(ValueError, match=r"reward.answer_pattern='\('"):
        ExactMatch("(")


def test_divides_by_the_standard_deviation_of_each_group():
    # Group 1: mean 0.25, deviations 0.75 and -0.25, variance (0.5625 + 3 * 0.0625) / 3 = 0.25.
    # Group 2: mean 5, deviations -3, -1, 1, 3, variance 20 / 3.
    std = (20 / 3) ** 0.5
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5, -3 / std, -1 / std, 1 / std, 3 / std])
    # The 1e-6 that is added to the standard deviation moves these numbers by 3e-6 at most.
    torch.testing.assert_close(
        group_relative_advantages(REWARDS, group_size=4), expected, rtol=0, atol=4e-6
    )


def test_without_the_standard_deviation_the_mean_alone_is_taken_off():
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25, -3.0, -1.0, 1.0, 3.0])
    advantages = group_relative_advantages(REWARDS, group_size=4, divide_by_std=False)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=0)


def test_leave_one_out_compares_with_the_mean_of_the_others():
    expected = []
    for group in REWARDS.view(2, 4).tolist():
        for index, reward in enumerate(group):
            others = group[:index] + group[index + 1 :]
            expected.append(reward - sum(others) / 3)
    advantages = group_relative_advantages(
        REWARDS, group_size=4, leave_one_out=True, divide_by_std=False
    )
    torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.7])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("divide_by_std", [False, True])
def test_a_group_of_equal_rewards_gets_exactly_zero(reward, leave_one_out, divide_by_std):
    advantages = group_relative_advantages(
        torch.full((14,), reward),
        group_size=7,
        leave_one_out=leave_one_out,
        divide_by_std=divide_by_std,
    )
    assert torch.equal(advantages, torch.zeros(14))


def test_groups_do_not_see_each_other():
    one = group_relative_advantages(REWARDS[:4], group_size=4)
    both = group_relative_advantages(REWARDS, group_size=4)
    assert torch.equal(one, both[:4])


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match="group_size=1 must be at least 2"):
        group_relative_advantages(REWARDS, group_size=1)
    with pytest.raises(ValueError, match="group_size=3 does not divide 8 rewards"):
        group_relative_advantages(REWARDS, group_size=3)
