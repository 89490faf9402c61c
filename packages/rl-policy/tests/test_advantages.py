"""Advantages beyond the group's, against numbers computed by hand."""

import pytest
import torch
from rl_policy.losses import (
    group_relative_advantages,
    groups_with_signal,
    overlong_penalties,
    per_reward_advantages,
    reward_to_go_penalty,
    whiten,
)

# 1e-6 is added to standard deviations of 0.4 and more.
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def test_whitening_is_over_the_batch():
    # Mean 0.25, variance (0.5625 + 3 * 0.0625) / 4 = 0.1875, standard deviation 0.4330127.
    advantages = torch.tensor([1.0, 0.0, 0.0, 0.0])
    expected = torch.tensor([1.7320508, -0.5773503, -0.5773503, -0.5773503])
    torch.testing.assert_close(whiten(advantages), expected, **TOLERANCE)
    # Divided by 3 instead: 0.25, standard deviation 0.5.
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5])
    torch.testing.assert_close(whiten(advantages, correction=1), expected, **TOLERANCE)


def test_whitening_over_tokens_counts_a_long_completion_more_often():
    # Values 1, 1, 1 and -3: mean 0, variance 12 / 4 = 3.
    advantages = torch.tensor([[1.0, 1.0, 1.0, 1.0], [-3.0, -3.0, -3.0, -3.0]])
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0]])
    expected = torch.tensor([1.0, -3.0])[:, None] / 3**0.5 * mask
    torch.testing.assert_close(whiten(advantages, mask), expected, **TOLERANCE)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e6])
def test_equal_values_become_exactly_zero(value):
    values = torch.full((7, 3), value)
    assert torch.equal(whiten(values), torch.zeros(7, 3))
    mask = torch.zeros(7, 3)
    assert torch.equal(whiten(torch.randn(7, 3), mask), torch.zeros(7, 3))
    mask[2, 1] = 1
    assert torch.equal(whiten(torch.randn(7, 3), mask, correction=1), torch.zeros(7, 3))


def test_each_reward_is_normalised_before_they_are_summed():
    # Group 1: deviations +-0.5 over 0.7071068 and +-5 over 7.0710678: they cancel at weight 1.
    rewards = torch.tensor([[1.0, 0.0], [0.0, 10.0], [2.0, 5.0], [0.0, 5.0]])
    equal = per_reward_advantages(rewards, weights=[1.0, 1.0], group_size=2)
    torch.testing.assert_close(equal, torch.tensor([0.0, 0.0, 0.7071068, -0.7071068]), **TOLERANCE)
    unequal = per_reward_advantages(rewards, weights=[1.0, 3.0], group_size=2)
    expected = torch.tensor([-1.4142136, 1.4142136, 0.7071068, -0.7071068])
    torch.testing.assert_close(unequal, expected, **TOLERANCE)
    plain = per_reward_advantages(
        rewards, weights=[1.0, 3.0], group_size=2, leave_one_out=True, divide_by_std=False
    )
    # Differences from the other completion: 1 - 3 * 10, and 2.
    torch.testing.assert_close(plain, torch.tensor([-29.0, 29.0, 2.0, -2.0]), **TOLERANCE)


def test_one_reward_alone_is_the_group_relative_advantage():
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0])
    alone = per_reward_advantages(rewards[:, None], weights=[1.0], group_size=4)
    assert torch.equal(alone, group_relative_advantages(rewards, group_size=4))
    with pytest.raises(ValueError, match="2 weights were given for 1 rewards"):
        per_reward_advantages(rewards[:, None], weights=[1.0, 1.0], group_size=4)


def test_groups_of_equal_rewards_have_no_signal():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    assert groups_with_signal(rewards, group_size=2).tolist() == [False, True, False]
    # Of several rewards, any may differ.
    several = torch.stack([rewards, torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 2.0])], dim=1)
    assert groups_with_signal(several, group_size=2).tolist() == [True, True, False]


def test_the_penalty_grows_over_the_last_tokens_before_the_limit():
    lengths = torch.tensor([1, 80, 85, 90, 100])
    penalties = overlong_penalties(lengths, max_length=100, buffer=20)
    assert penalties.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0]
    # A buffer need not be whole: 1.2 of 6 tokens begin at 4.8.
    expected = torch.tensor([0.0, -0.2 / 1.2, -1.0])
    found = overlong_penalties(torch.tensor([4, 5, 6]), max_length=6, buffer=1.2)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_a_token_is_charged_with_what_follows_it():
    penalties = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 9.0, 5.0, 9.0]])
    penalties[1, 3] = float("nan")  # padding
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0]])
    expected = [[4.0, 4.0, 3.0, 3.0], [5.0, 5.0, 5.0, 0.0]]
    assert reward_to_go_penalty(penalties, mask).tolist() == expected
