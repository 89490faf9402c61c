"""Advantages beyond the group's, against numbers computed by hand."""

import math

import numpy as np
import pytest
import torch
from rl_policy.losses import (
    explained_variance,
    generalized_advantages,
    group_relative_advantages,
    groups_with_signal,
    overlong_penalties,
    per_reward_advantages,
    reward_to_go_penalty,
    token_rewards,
    token_values,
    whiten,
)

pytestmark = pytest.mark.promise

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
    expected = torch.tensor([0.0, -0.2 / 1.2, -1.0], dtype=torch.float64)
    found = overlong_penalties(torch.tensor([4, 5, 6]), max_length=6, buffer=1.2)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_a_token_is_charged_with_what_follows_it():
    penalties = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 9.0, 5.0, 9.0]])
    penalties[1, 3] = float("nan")  # padding
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0]])
    expected = [[4.0, 4.0, 3.0, 3.0], [5.0, 5.0, 5.0, 0.0]]
    assert reward_to_go_penalty(penalties, mask).tolist() == expected


def test_advantages_by_a_value_model_look_ahead_by_lam():
    # Targets 1 and 2; deltas 0.6 - 0.5 = 0.1 and 1 - 0.6 = 0.4.
    rewards = torch.tensor([[7.0, 0.0, 1.0, 7.0]])
    values = torch.tensor([[9.0, 0.5, 0.6, 9.0]])
    mask = torch.tensor([[0, 1, 1, 0]])
    half = generalized_advantages(rewards, values, mask, gamma=1.0, lam=0.5)
    torch.testing.assert_close(half[0], torch.tensor([[0.0, 0.3, 0.4, 0.0]]))
    torch.testing.assert_close(half[1], torch.tensor([[0.0, 0.8, 1.0, 0.0]]))
    # One token ahead, and the whole return; with gamma 0.5 the first delta is 0.3 - 0.5.
    next_alone, _ = generalized_advantages(rewards, values, mask, gamma=1.0, lam=0.0)
    torch.testing.assert_close(next_alone, torch.tensor([[0.0, 0.1, 0.4, 0.0]]))
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.5, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.5, 1.0, 0.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.0, 0.4, 0.0]]))


def test_what_is_no_target_takes_no_time_and_has_no_value():
    """An episode of two turns equals one completion without what is between them."""
    generator = torch.Generator().manual_seed(3)
    rewards, values = (torch.randn(4, 5, generator=generator) for _ in range(2))
    settings = {"gamma": 0.9, "lam": 0.8}
    expected = generalized_advantages(rewards, values, torch.ones(4, 5), **settings)
    place, mask = [1, 2, 5, 6, 8], torch.zeros(4, 10)
    mask[:, place] = 1
    # Whatever is there: rewards of other tokens, and values that are not finite.
    wide = [torch.full((4, 10), fill) for fill in (3.0, float("nan"))]
    wide[0][:, place], wide[1][:, place] = rewards, values
    found = generalized_advantages(*wide, mask, **settings)
    for ours, narrow in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:, place], narrow)
        assert not ours[mask == 0].any()


def test_values_are_of_the_state_in_which_a_token_is_sampled():
    scores = torch.tensor([[0.1, 0.2, 0.3]])
    assert torch.equal(token_values(scores), torch.tensor([[0.0, 0.1, 0.2]]))


def test_the_reward_is_at_the_last_target_and_penalties_at_all():
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]])
    rewards = torch.tensor([1.0, 2.0, 3.0])
    expected = torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0]]).double()
    assert torch.equal(token_rewards(rewards, mask), expected)
    penalties = torch.tensor([[float("inf"), 0.25, 0.5, 9.0]]).expand(3, 4)
    expected -= torch.tensor([[0, 0.25, 0.5, 0], [0, 0.25, 0, 9], [0, 0, 0, 0]]).double()
    assert torch.equal(token_rewards(rewards, mask, penalties), expected)


def test_the_explained_variance_is_that_of_numpy():
    generator = torch.Generator().manual_seed(4)
    values, returns = (torch.randn(6, 7, generator=generator) for _ in range(2))
    mask = torch.rand(6, 7, generator=generator) < 0.6
    known, total = values[mask].double().numpy(), returns[mask].double().numpy()
    expected = 1 - np.var(total - known) / np.var(total)
    assert explained_variance(values, returns, mask) == pytest.approx(expected, rel=1e-12)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(returns + 3, returns, mask) == pytest.approx(1)
    assert math.isnan(explained_variance(values, torch.ones(6, 7), mask))
