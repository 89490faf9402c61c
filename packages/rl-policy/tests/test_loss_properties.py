"""What holds of every loss, whatever a batch has: zero gradients, and metrics that add up."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_interfaces import LossInput
from rl_policy.losses import (
    ClippedPGLoss,
    DistillationLoss,
    DPOLoss,
    NLLLoss,
    PreferenceLoss,
    ValueLoss,
    group_relative_advantages,
    overlong_penalties,
    per_reward_advantages,
)
from rl_policy.recipes.policy_gradient.objectives import reward_columns
from rl_policy.tinker.losses import TinkerLoss

SEQUENCE = {"loss_type": "sequence_level"}
LOSSES = {
    "ppo": ClippedPGLoss(),
    "dual": ClippedPGLoss(dual_clip=3.0),
    "unbounded": ClippedPGLoss(clip_low=None, clip_high=None),
    "gspo": ClippedPGLoss(ratio_level="sequence", dual_clip=3.0, **SEQUENCE),
    "cispo": ClippedPGLoss(clipping="cispo", clip_high=4.0, clip_low=None),
    "tis": ClippedPGLoss(importance_cap=2.0, dual_clip=3.0),
    "icepop": ClippedPGLoss(importance_cap=2.0, importance_mode="token_mask", dual_clip=3.0),
    "mis": ClippedPGLoss(importance_cap=2.0, importance_mode="sequence_mask", dual_clip=3.0),
}
# Log-ratios whose exp is ordinary, 0, infinite, or not a number.
LOG_RATIOS = st.sampled_from([0.0, 0.05, 0.5, -2.0, 90.0, 800.0, -800.0, math.inf, math.nan])
TOKENS = st.tuples(
    LOG_RATIOS, st.sampled_from([0.0, 1.0, -1.0]), st.sampled_from([0, 1]), LOG_RATIOS
)


def exp(value):
    return math.inf if value > 700 else math.exp(value)


def pg_batch(tokens):
    log_ratio, advantages, mask, log_weight = (
        torch.tensor([[first, *column]])
        for first, column in zip((0.0, 0.0, 0, 0.0), zip(*tokens, strict=True), strict=True)
    )
    logprobs = torch.full_like(log_ratio, -1.0).requires_grad_()
    batch = {
        "token_mask": mask,
        "sample_mask": torch.ones(1),
        "advantages": advantages,
        "prev_logprobs": -1.0 - log_ratio,
        "generation_logprobs": -1.0 - log_ratio - log_weight,
    }
    return logprobs, batch


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=150)
@given(tokens=st.lists(TOKENS, min_size=1, max_size=4))
def test_a_token_that_is_clipped_masked_or_without_advantage_has_no_gradient(name, tokens):
    loss_fn = LOSSES[name]
    logprobs, batch = pg_batch(tokens)
    loss, _ = loss_fn(logprobs, batch, torch.tensor(1.0), torch.tensor(float(len(tokens))))
    loss.backward()
    found = logprobs.grad[0, 1:].tolist()
    ratios = [log_ratio for log_ratio, _, _, _ in tokens]
    if name == "gspo":
        # One ratio, and so one gradient, of all targets of the row.
        targets = [each for each in tokens if each[2]]
        ratios = [sum(each[0] for each in targets) / max(1, len(targets))] * len(tokens)
        has_none = not any(each[1] for each in targets)
        assert not has_none or found == [0.0] * len(tokens)
    for (_, advantage, target, log_weight), log_ratio, gradient in zip(
        tokens, ratios, found, strict=True
    ):
        ratio = exp(log_ratio)
        is_bounded = loss_fn.clipping == "ppo" and loss_fn.clip_high is not None
        is_clipped = is_bounded and (
            (advantage > 0 and ratio > 1 + loss_fn.clip_high)
            or (advantage < 0 and ratio < 1 - loss_fn.clip_low)
            or (advantage < 0 and loss_fn.dual_clip is not None and ratio > loss_fn.dual_clip)
        )
        is_dropped = name == "icepop" and not exp(log_weight) <= 2.0
        if name == "gspo":
            is_zero = not target or (
                is_clipped and len({each[1] for each in tokens if each[2]}) == 1
            )
        else:
            is_zero = not target or advantage == 0 or is_clipped or is_dropped
        if is_zero and not math.isnan(ratio):
            assert gradient == 0.0
        if not target or (advantage == 0 and name != "gspo"):
            assert gradient == 0.0


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("name", ["nll", "pg", "dpo", "value", "distillation"])
def test_what_is_masked_may_be_anything(name, garbage):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 4, 5) if name == "distillation" else (2, 4)
    clean = -torch.rand(shape, generator=generator) - 0.5
    batch = {
        "token_mask": torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]]),
        "sample_mask": torch.ones(2),
        "advantages": torch.ones(2, 4),
        "prev_logprobs": torch.full((2, 4), -1.0),
        "reference_logprobs": torch.full((2, 4), -1.0),
        "returns": torch.ones(2, 4),
        "prev_values": torch.zeros(2, 4),
        "topk_logits": torch.rand(2, 4, 3, generator=generator),
        "topk_indices": torch.tensor([0, 2, 4]).expand(2, 4, 3),
    }
    loss_fn = {
        "nll": NLLLoss(),
        "pg": ClippedPGLoss(kl_coef=0.1, entropy_coef=0.1, clip_high=None, clip_low=None),
        "dpo": DPOLoss(),
        "value": ValueLoss(),
        "distillation": DistillationLoss(),
    }[name]
    # Values and logits are of the state before their token.
    shift = 1 if name in ("value", "distillation") else 0
    is_masked = torch.ones(2, 4, dtype=torch.bool)
    is_masked[:, : 4 - shift] = batch["token_mask"][:, shift:] == 0
    counts = torch.tensor(2.0), torch.tensor(4.0)

    def evaluate(inputs, data):
        inputs = inputs.clone().requires_grad_()
        loss, metrics = loss_fn(inputs, data, *counts)
        loss.backward()
        return loss.item(), {key: float(each) for key, each in metrics.items()}, inputs.grad

    dirty = clean.clone()
    dirty[is_masked] = garbage
    columns = ("advantages", "prev_logprobs", "reference_logprobs", "returns", "prev_values")
    spoiled = {**batch}
    for key in columns:
        spoiled[key] = torch.where(batch["token_mask"] > 0, batch[key], garbage)
    wanted, found = evaluate(clean, batch), evaluate(dirty, spoiled)
    assert found[:2] == wanted[:2]
    assert torch.equal(found[2], wanted[2])
    assert (found[2][is_masked] == 0).all()


TINKER = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
}


@pytest.mark.parametrize("name", TINKER)
def test_the_losses_of_clients_have_no_gradient_there_either(name):
    log_ratios = [800.0, math.nan, 800.0 if name in ("ppo", "gspo") else 0.0]
    logprobs = torch.full((3, 2), -1.0).requires_grad_()
    one = torch.tensor([[0.0, 1.0]]).expand(3, 2)
    batch = {
        "is_target": one,
        "sample_mask": torch.ones(3),
        # The last is clipped by either of those.
        "advantages": torch.tensor([0.0, 0.0, 1.0])[:, None] * one,
        "logprobs": -1.0 - torch.tensor(log_ratios)[:, None] * one,
        "sequence_ratio_mask": one,
    }
    loss_fn = TinkerLoss(name=name, settings=TINKER[name], input_type=LossInput.LOGPROBS)
    loss, _, _ = loss_fn(logprobs, batch, torch.tensor(3.0), torch.tensor(3.0))
    loss.backward()
    assert logprobs.grad[:2].tolist() == [[0.0, 0.0]] * 2
    if name in ("ppo", "gspo"):
        assert logprobs.grad[2].tolist() == [0.0, 0.0]


FRACTIONAL = {
    "nll": NLLLoss(),
    "token": ClippedPGLoss(kl_coef=0.1),
    "sequence": ClippedPGLoss(kl_coef=0.1, **SEQUENCE),
    "gspo": ClippedPGLoss(ratio_level="sequence", **SEQUENCE),
    "dpo": DPOLoss(),
    "value": ValueLoss(),
    "preference": PreferenceLoss(),
}
MEANS = {"nll": "nll", "token": "policy_loss", "gspo": "policy_loss", "sequence": "policy_loss"}


def fractional_batch():
    generator = torch.Generator().manual_seed(4)

    def noise(scale):
        return scale * torch.randn(8, 6, generator=generator, dtype=torch.float64)

    logprobs = -noise(1.0).abs()
    # Each pair of rows has one weight, as preferences need.
    weights = torch.tensor([0.25, 0.5, 0.0, 1.0], dtype=torch.float64).repeat_interleave(2)
    mask = torch.rand(8, 6, generator=generator, dtype=torch.float64)
    batch = {
        "token_mask": mask * (mask > 0.3),
        "sample_mask": weights,
        "advantages": noise(1.0),
        "prev_logprobs": logprobs + noise(0.3),
        "reference_logprobs": logprobs + noise(0.3),
        "returns": noise(1.0),
        "prev_values": noise(1.0),
    }
    return logprobs, batch


@pytest.mark.parametrize("size", [2, 4, 6])
@pytest.mark.parametrize("name", FRACTIONAL)
def test_loss_and_metrics_of_fractional_masks_add_up_over_micro_batches(name, size):
    loss_fn = FRACTIONAL[name]
    logprobs, batch = fractional_batch()
    inputs = logprobs[:, 0] if name == "preference" else logprobs
    counts = (
        batch["sample_mask"].sum(),
        (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum(),
    )
    loss, metrics = loss_fn(inputs, batch, *counts)
    total, sums = 0.0, dict.fromkeys(metrics, 0.0)
    for at in range(0, 8, size):
        rows = slice(at, at + size)
        part, measured = loss_fn(
            inputs[rows], {key: each[rows] for key, each in batch.items()}, *counts
        )
        total += float(part)
        # As a worker reads them: those of a micro-batch without a valid sample do not count.
        if measured["num_valid_samples"] > 0:
            sums = {key: sums[key] + float(each) for key, each in measured.items()}
    assert total == pytest.approx(float(loss), rel=1e-6)
    for key, value in metrics.items():
        assert sums[key] == pytest.approx(float(value), rel=1e-6, abs=1e-9), key
    if name in MEANS and not getattr(loss_fn, "kl_coef", 0):
        assert sums[MEANS[name]] == pytest.approx(total, rel=1e-6)


def test_fractional_masks_weigh_rows_and_tokens():
    logprobs, batch = fractional_batch()
    weights, mask = batch["sample_mask"].numpy(), batch["token_mask"].numpy()[:, 1:]
    log_ratio = (logprobs - batch["prev_logprobs"]).numpy()[:, 1:]
    advantages = batch["advantages"].numpy()[:, 1:]

    def surrogate(ratio):
        return -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)

    counts = torch.tensor(weights.sum()), torch.tensor((mask * weights[:, None]).sum())
    loss, _ = ClippedPGLoss(**SEQUENCE)(logprobs, batch, *counts)
    rows = (surrogate(np.exp(log_ratio)) * mask).sum(1) / mask.sum(1)
    assert float(loss) == pytest.approx((rows * weights).sum() / weights.sum(), rel=1e-6)
    mean = ((log_ratio * mask).sum(1) / mask.sum(1))[:, None]
    loss, _ = ClippedPGLoss(ratio_level="sequence", **SEQUENCE)(logprobs, batch, *counts)
    rows = (surrogate(np.exp(mean)) * mask).sum(1) / mask.sum(1)
    assert float(loss) == pytest.approx((rows * weights).sum() / weights.sum(), rel=1e-6)


@settings(deadline=None, max_examples=100)
@given(
    offset=st.sampled_from([0.0, 1e8, -3e9, 1e12]),
    values=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    leave_one_out=st.booleans(),
    divide_by_std=st.booleans(),
)
def test_advantages_are_those_of_float64(offset, values, leave_one_out, divide_by_std):
    rewards = np.array(values, dtype=np.float64) + offset
    baseline = (rewards.sum() - rewards) / 3 if leave_one_out else rewards.mean()
    wanted = rewards - baseline
    if divide_by_std:
        wanted = wanted / (rewards.std(ddof=1) + 1e-6)
    options = {"group_size": 4, "leave_one_out": leave_one_out, "divide_by_std": divide_by_std}
    given_rewards = torch.tensor(rewards)
    found = group_relative_advantages(given_rewards, **options)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-3, atol=1e-3)
    two = torch.stack([given_rewards, given_rewards], dim=1)
    summed = per_reward_advantages(two, weights=[1.0, 2.0], **options)
    np.testing.assert_allclose(summed.numpy(), 3 * wanted, rtol=1e-3, atol=3e-3)


def test_rewards_that_differ_in_float64_alone_keep_their_difference():
    rewards = [1e8, 1e8 + 1]
    assert reward_columns(rewards).diff(dim=0).item() == 1.0
    lengths = torch.tensor([2**24 + 1])
    assert overlong_penalties(lengths, max_length=2**24 + 2, buffer=2.0).item() == -0.5
