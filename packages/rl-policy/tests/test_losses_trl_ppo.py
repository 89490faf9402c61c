"""Rewards, advantages, returns, losses and gradients of PPO against those of TRL's trainer.

`trl_ppo.json` holds the numbers and names version, function and the command that made them. TRL
gives a completion that ends before the limit of tokens one more position, whose token is padding:
the reward is there, and a value is learnt there. Rows that reach the limit have no such position.
"""

import json
from pathlib import Path

import pytest
import torch
from rl_policy.losses import (
    STD_EPSILON,
    ClippedPGLoss,
    ValueLoss,
    estimate_kl,
    generalized_advantages,
    token_rewards,
    token_values,
    whiten,
)
from tolerances import ELEMENTWISE, REPEATED
from torch.nn.functional import pad

TRL = json.loads((Path(__file__).parent / "trl_ppo.json").read_text())
SETTINGS = TRL["settings"]
# TRL computes in float32.
TOLERANCE = {"rtol": 4 * REPEATED, "atol": 4 * REPEATED}


def column(values):
    """Return an input behind a first token, that of the prompt; `[batch, seq + 1]`."""
    return pad(torch.tensor(values, dtype=torch.float64), (1, 0))


def batch_of(case):
    return {name: column(each) for name, each in case["batch"].items() if name != "scores"}


def estimate(rewards, case):
    """Return advantages and returns at the positions at which TRL has values."""
    discounts = {name: SETTINGS[name] for name in ("gamma", "lam")}
    mask = column(case["is_value"])
    return generalized_advantages(rewards, batch_of(case)["values"], mask, **discounts)


def test_rewards_with_a_penalty_at_each_token_are_those_of_trl():
    case = TRL["cases"]["full"]
    data = batch_of(case)
    kl = estimate_kl(data["ref_logprobs"] - data["logprobs"], estimator=SETTINGS["kl_estimator"])
    scores = torch.tensor(case["batch"]["scores"])
    rewards = token_rewards(scores, column(case["is_token"]), SETTINGS["kl_coef"] * kl)
    torch.testing.assert_close(rewards, data["rewards"], **TOLERANCE)
    assert scores.abs().min() > 1e-3
    advantages, returns = estimate(rewards, case)
    torch.testing.assert_close(advantages, column(case["raw_advantages"]), **TOLERANCE)
    torch.testing.assert_close(returns, data["returns"], **TOLERANCE)


@pytest.mark.parametrize("name", TRL["cases"])
def test_advantages_and_returns_are_those_of_trl(name):
    case = TRL["cases"][name]
    data = batch_of(case)
    advantages, returns = estimate(data["rewards"], case)
    is_value = column(case["is_value"])
    expected = column(case["raw_advantages"]) * is_value
    torch.testing.assert_close(advantages, expected, **TOLERANCE)
    torch.testing.assert_close(returns, data["returns"] * is_value, **TOLERANCE)


@pytest.mark.parametrize("name", TRL["cases"])
def test_whitened_advantages_are_those_of_trl(name):
    case = TRL["cases"][name]
    raw, mask = column(case["raw_advantages"]), column(case["is_token"])
    std = raw[mask > 0].std()
    # TRL adds 1e-8 to the variance.
    ours = whiten(raw, mask, correction=1) * float((std + STD_EPSILON) / (std**2 + 1e-8).sqrt())
    torch.testing.assert_close(ours, column(case["batch"]["advantages"]), **TOLERANCE)


@pytest.mark.parametrize("name", TRL["cases"])
def test_the_policys_loss_and_gradient_are_those_of_trl(name):
    case = TRL["cases"][name]
    data, update = batch_of(case), case["update"]
    clip = SETTINGS["cliprange"]
    batch = {
        "token_mask": column(case["is_token"]),
        "sample_mask": torch.ones(len(case["is_token"])),
        "advantages": data["advantages"],
        "prev_logprobs": data["logprobs"],
    }
    logprobs = column(update["new_logprobs"]).requires_grad_()
    counts = batch["sample_mask"].sum(), batch["token_mask"].sum()
    loss, metrics = ClippedPGLoss(clip_low=clip, clip_high=clip)(logprobs, batch, *counts)
    loss.backward()
    assert loss.item() == pytest.approx(update["policy_loss"], abs=4 * REPEATED)
    torch.testing.assert_close(logprobs.grad, column(update["logprob_gradient"]), **TOLERANCE)
    assert metrics["clip_fraction"].item() == pytest.approx(case["clip_fraction"], abs=ELEMENTWISE)
    assert 0 < case["clip_fraction"] < 1


@pytest.mark.parametrize("name", TRL["cases"])
def test_the_value_models_loss_and_gradient_are_those_of_trl(name):
    case = TRL["cases"][name]
    data, update = batch_of(case), case["update"]
    batch = {
        "token_mask": column(case["is_value"]),
        "sample_mask": torch.ones(len(case["is_value"])),
        "returns": data["returns"],
        "prev_values": data["values"],
    }
    # The value of the state of token t is what the model gives after token t - 1.
    scores = pad(torch.tensor(update["new_values"], dtype=torch.float64), (0, 1))
    torch.testing.assert_close(token_values(scores), column(update["new_values"]))
    scores.requires_grad_()
    counts = batch["sample_mask"].sum(), batch["token_mask"].sum()
    loss, metrics = ValueLoss(clip=SETTINGS["cliprange_value"])(scores, batch, *counts)
    loss.backward()
    assert loss.item() == pytest.approx(update["value_loss"], rel=4 * REPEATED)
    # TRL's gradient is that of both losses, with a coefficient.
    gradient = torch.tensor(update["value_gradient"], dtype=torch.float64) / SETTINGS["vf_coef"]
    torch.testing.assert_close(scores.grad, pad(gradient, (0, 1)), **TOLERANCE)
    share = metrics["value_clip_fraction"].item()
    assert share == pytest.approx(case["value_clip_fraction"], abs=ELEMENTWISE)
    assert 0 < share < 1
