"""Losses, gradients and advantages against those of TRL's trainers.

`trl_losses.json` holds the numbers and names version, functions and the command that made them.
"""

import json
from pathlib import Path

import pytest
import torch
from rl_policy.losses import (
    STD_EPSILON,
    ClippedPGLoss,
    DPOLoss,
    PreferenceLoss,
    estimate_kl,
    group_relative_advantages,
    per_reward_advantages,
    whiten,
)
from tolerances import ELEMENTWISE, REPEATED, STEP

pytestmark = pytest.mark.promise

TRL = json.loads((Path(__file__).parent / "trl_losses.json").read_text())
# TRL computes advantages in float32, and all else here in float64.
TOLERANCE = {"rtol": ELEMENTWISE, "atol": STEP}
# The models of pairs are float32, and so are sums of log-probabilities of about 4.
PAIR = 4 * REPEATED
PAIR_TOLERANCE = {"rtol": PAIR, "atol": PAIR}
TRL_STD_EPSILON = 1e-4
SEQUENCE = {"loss_type": "sequence_level"}
BOUNDS = {"importance_floor": 0.8, "importance_cap": 1.25}

OURS = {
    "grpo": {**SEQUENCE, "kl_coef": 0.04},
    "dapo": {"clip_high": 0.28},
    "dr_grpo": {**SEQUENCE, "length_divisor": TRL["max_completion_length"]},
    "gspo": {**SEQUENCE, "ratio_level": "sequence", "clip_low": 0.05, "clip_high": 0.05},
    "luspo": {
        **SEQUENCE,
        "ratio_level": "sequence",
        "clip_low": 0.05,
        "clip_high": 0.05,
        "length_divisor": 1,
    },
    # TRL's epsilon_high is the bound itself, and it has no lower one.
    "cispo": {"clipping": "cispo", "clip_low": None, "clip_high": 0.3},
    "unbiased_kl": {**SEQUENCE, "kl_coef": 0.1, "kl_unbiased": True},
    "gdpo": {},
    **{
        mode: {"importance_mode": mode, **BOUNDS}
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
}


def column(name):
    """Return an input behind a first token, that of the prompt; `[batch, seq + 1]`."""
    return torch.nn.functional.pad(torch.tensor(TRL["inputs"][name], dtype=torch.float64), (1, 0))


def batch(advantages):
    mask = torch.arange(1, max(TRL["lengths"]) + 1) <= torch.tensor(TRL["lengths"])[:, None]
    names = ("prev_logprobs", "generation_logprobs", "reference_logprobs")
    return {
        "token_mask": torch.nn.functional.pad(mask.long(), (1, 0)),
        "sample_mask": torch.ones(len(TRL["lengths"])),
        "advantages": torch.tensor(advantages)[:, None].expand(-1, mask.shape[1] + 1),
        **{name: column(name) for name in names},
    }


@pytest.mark.parametrize("name", list(OURS))
def test_losses_and_gradients_are_those_of_trl(name):
    expected = TRL["grpo"][name]
    logprobs, data = column("logprobs").requires_grad_(), batch(expected["advantages"])
    counts = torch.tensor(len(TRL["lengths"])), torch.tensor(sum(TRL["lengths"]))
    loss, _ = ClippedPGLoss(**OURS[name])(logprobs, data, *counts)
    loss.backward()
    # The shares of tokens and rows are float32, and the terms of the sum are up to 1.
    assert loss.item() == pytest.approx(expected["loss"], rel=ELEMENTWISE, abs=1e-8)
    gradient = torch.tensor(expected["gradient"], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad[:, 1:], gradient, **TOLERANCE)


def test_no_two_cases_are_the_same_and_bounds_are_crossed():
    """Each setting changes something here: a case that equals another would show nothing."""
    losses = {round(case["loss"], 9) for case in TRL["grpo"].values()}
    assert losses == {round(TRL["grpo"][name]["loss"], 9) for name in OURS}
    assert len(losses) == len(OURS)
    for mode in ("token_mask", "sequence_mask", "token_truncate", "sequence_truncate"):
        loss = ClippedPGLoss(**OURS[mode])
        _, metrics = loss(column("logprobs"), batch([1.0] * 8), torch.tensor(8), torch.tensor(34))
        assert 0 < float(metrics["importance_outside"]) < 1


def group_stds(rewards):
    return rewards.view(-1, TRL["group_size"]).std(1).repeat_interleave(TRL["group_size"])


def test_group_advantages_are_those_of_trl():
    rewards = torch.tensor(TRL["inputs"]["rewards"]) @ torch.tensor([1.0, 0.5])
    ours = group_relative_advantages(rewards, group_size=TRL["group_size"])
    # What is added to the standard deviation differs.
    std = group_stds(rewards)
    ours = ours * (std + STD_EPSILON) / (std + TRL_STD_EPSILON)
    torch.testing.assert_close(ours, torch.tensor(TRL["grpo"]["grpo"]["advantages"]), **TOLERANCE)
    plain = group_relative_advantages(rewards, group_size=TRL["group_size"], divide_by_std=False)
    expected = torch.tensor(TRL["grpo"]["dr_grpo"]["advantages"])
    torch.testing.assert_close(plain, expected, rtol=REPEATED, atol=ELEMENTWISE)


def test_advantages_of_each_reward_are_those_of_trl():
    rewards = torch.tensor(TRL["inputs"]["rewards"])
    total = per_reward_advantages(rewards, weights=[1.0, 0.5], group_size=TRL["group_size"])
    ours = whiten(total, correction=1)
    # 1e-4 instead of 1e-6 is added to standard deviations of 0.3 and more, twice.
    expected = torch.tensor(TRL["grpo"]["gdpo"]["advantages"])
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-4)
    summed = group_relative_advantages(
        rewards @ torch.tensor([1.0, 0.5]), group_size=TRL["group_size"]
    )
    assert (ours - whiten(summed, correction=1)).abs().max() > 0.1


def test_leave_one_out_with_kl_in_the_reward_is_that_of_trl():
    rewards = torch.tensor(TRL["inputs"]["rewards"]) @ torch.tensor([1.0, 0.5])
    data = batch([0.0] * 8)
    kl = estimate_kl(data["reference_logprobs"] - data["prev_logprobs"], estimator="k1")
    penalty = TRL["rloo"]["settings"]["beta"] * (kl * data["token_mask"]).sum(1)
    ours = group_relative_advantages(
        rewards - penalty, group_size=TRL["group_size"], leave_one_out=True, divide_by_std=False
    )
    expected = torch.tensor(TRL["rloo"]["advantages"], dtype=ours.dtype)
    torch.testing.assert_close(ours, expected, rtol=REPEATED, atol=ELEMENTWISE)


def interleaved(values):
    """Return rows that TRL has as all chosen before all rejected in pairs, `[batch, ...]`."""
    rows = torch.tensor(values)
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


@pytest.mark.parametrize("beta", TRL["dpo"])
def test_loss_and_gradient_of_preferences_are_those_of_trl(beta):
    case = TRL["dpo"][beta]
    mask = interleaved(case["is_target"])

    def behind_a_prompt(name):
        # Beside the targets TRL has zeros, and a batch may have anything.
        rows = torch.where(mask > 0, interleaved(case[name]), 7.0 if name == "logprobs" else 1.0)
        return torch.nn.functional.pad(rows, (1, 0))

    logprobs = behind_a_prompt("logprobs").requires_grad_()
    batch = {
        "token_mask": torch.nn.functional.pad(mask, (1, 0)),
        "sample_mask": torch.ones(len(mask)),
        "reference_logprobs": behind_a_prompt("reference_logprobs"),
    }
    loss, metrics = DPOLoss(beta=case["beta"])(
        logprobs, batch, torch.tensor(len(mask)), batch["token_mask"].sum()
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=PAIR)
    expected = interleaved(case["gradient"]) * mask
    torch.testing.assert_close(logprobs.grad[:, 1:], expected, **PAIR_TOLERANCE)
    names = ("chosen_reward", "rejected_reward", "reward_margin", "pair_accuracy")
    rewards = [case["rewards"][name] for name in ("chosen", "rejected", "margins", "accuracies")]
    assert [float(metrics[name]) for name in names] == pytest.approx(rewards, rel=PAIR)
    assert 0 < float(metrics["pair_accuracy"]) < 1


@pytest.mark.parametrize("name", TRL["reward_model"])
def test_loss_and_gradient_of_a_reward_model_are_those_of_trl(name):
    case = TRL["reward_model"][name]
    scores = interleaved(case["scores"]).requires_grad_()
    batch = {"sample_mask": torch.ones(len(scores))}
    loss, _ = PreferenceLoss(center_coef=case["center_rewards_coefficient"] or 0.0)(
        scores, batch, torch.tensor(len(scores)), torch.tensor(1)
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=PAIR)
    torch.testing.assert_close(scores.grad, interleaved(case["gradient"]), **PAIR_TOLERANCE)
