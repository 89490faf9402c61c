import pytest
from rl_policy.recipes.problems import Problem
from rl_policy.recipes.rewards import ExactMatch

PROBLEM = Problem("27+35=", "62")


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
