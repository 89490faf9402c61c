"""`ClippedPGLoss` and advantages against the formulas of NeMo RL, written anew in numpy float64.

They are those of `nemo_rl/algorithms/loss/loss_functions.py`, `ClippedPGLossFn.__call__`,
`nemo_rl/algorithms/utils.py`, `calculate_kl`, and `nemo_rl/algorithms/advantage_estimator.py` of
NVIDIA-NeMo/RL, at the commits 006907a, 0043953 and 00925dd. Left out are the 1e-8 that it adds to
counts, and the score function by which it weighs the KL penalty: its value is 1.
"""

import numpy as np
import pytest
import torch
from loss_batches import counts_of, random_batch
from rl_policy.losses import ClippedPGLoss, group_relative_advantages, per_reward_advantages, whiten
from tolerances import ELEMENTWISE

pytestmark = pytest.mark.promise

# Shares of tokens and rows are float32.
TOLERANCE = {"rel": ELEMENTWISE, "abs": 1e-8}


def kl_of(logprobs, reference, kind, input_clamp, output_clamp):
    log_ratio = reference - logprobs
    if input_clamp is not None:
        log_ratio = np.clip(log_ratio, -input_clamp, input_clamp)
    kl = {
        "k1": -log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": np.exp(log_ratio) - 1 - log_ratio,
    }[kind]
    return kl if output_clamp is None else np.clip(kl, -output_clamp, output_clamp)


def weights_of(log_weight, mask, *, per_sequence, kind, low, high):
    """Return the importance weights `[batch, seq]` of a type of truncation."""
    weights = np.exp(log_weight)
    if per_sequence:
        total = np.exp((log_weight * mask).sum(1, keepdims=True))
        weights = np.broadcast_to(total, log_weight.shape)
    if kind == "tis":
        return np.clip(weights, low or 0.0, high)
    if kind == "icepop":
        return np.where((weights >= low) & (weights <= high), weights, 0.0)
    mean = (log_weight * mask).sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1)
    kept = (np.exp(mean) >= low) & (np.exp(mean) <= high)
    return weights * kept


def nemo_loss(
    logprobs, data, *, level, per_sequence=False, cispo=False, dual=None, kl=None, tis=None
):
    """Return the loss of a full batch; `kl` and `tis` are arguments of the functions above."""
    columns = {key: np.asarray(value, dtype=np.float64) for key, value in data.items()}
    current, prev = np.asarray(logprobs)[:, 1:], columns["prev_logprobs"][:, 1:]
    advantages, tokens = columns["advantages"][:, 1:], columns["token_mask"][:, 1:]
    samples = columns["sample_mask"]
    length = np.maximum(tokens.sum(1, keepdims=True), 1)
    log_ratio = current - prev
    if per_sequence:
        mean = (log_ratio * tokens).sum(1, keepdims=True) / length
        log_ratio = np.broadcast_to(mean, log_ratio.shape)
    ratio = np.exp(log_ratio)
    clipped = np.clip(ratio, 1 - 0.2, 1 + 0.28)
    cost = np.maximum(-advantages * ratio, -advantages * clipped)
    if cispo:
        cost = -advantages * clipped * current
    if dual is not None:
        cost = np.where(advantages < 0, np.minimum(cost, -advantages * dual), cost)
    if tis is not None:
        log_weight = prev - columns["generation_logprobs"][:, 1:]
        cost = cost * weights_of(log_weight, tokens, per_sequence=per_sequence, **tis)
    if kl is not None:
        cost = cost + 0.1 * kl_of(current, columns["reference_logprobs"][:, 1:], **kl)
    if level == "token_level":
        mask = tokens * samples[:, None]
        return (cost * mask).sum() / mask.sum()
    return ((cost * tokens).sum(1) / length[:, 0] * samples).sum() / samples.sum()


def our_loss(logprobs, data, **settings):
    loss = ClippedPGLoss(clip_low=0.2, clip_high=0.28, **settings)
    return float(loss(logprobs, data, *counts_of(data))[0])


@pytest.mark.parametrize("level", ["token_level", "sequence_level"])
@pytest.mark.parametrize(("dual", "cispo"), [(None, False), (1.2, False), (None, True)])
def test_clipping_is_that_of_nemo_rl(level, dual, cispo):
    logprobs, data = random_batch()
    ours = our_loss(
        logprobs, data, loss_type=level, dual_clip=dual, clipping="cispo" if cispo else "ppo"
    )
    theirs = nemo_loss(logprobs, data, level=level, dual=dual, cispo=cispo)
    assert ours == pytest.approx(theirs, **TOLERANCE)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("clamps", [(None, None), (0.2, None), (0.4, 0.03)])
def test_the_penalty_is_that_of_nemo_rl(kind, clamps):
    logprobs, data = random_batch()
    # With a ratio of 1 it has the same value as NeMo RL's, which weighs by exp(x - stopped x).
    data["prev_logprobs"] = logprobs
    settings = {"kl_estimator": kind, "kl_log_ratio_clamp": clamps[0], "kl_clamp": clamps[1]}
    ours = our_loss(logprobs, data, kl_coef=0.1, kl_unbiased=True, **settings)
    kl = {"kind": kind, "input_clamp": clamps[0], "output_clamp": clamps[1]}
    assert ours == pytest.approx(nemo_loss(logprobs, data, level="token_level", kl=kl), **TOLERANCE)


@pytest.mark.parametrize(
    ("mode", "kind", "low", "high"),
    [
        ("token_truncate", "tis", None, 1.1),
        ("token_truncate", "tis", 0.8, 1.1),
        ("token_mask", "icepop", 0.8, 1.25),
        ("geometric_mask", "seq-mask-tis", 0.9, 1.1),
    ],
)
@pytest.mark.parametrize("level", ["token_level", "sequence_level"])
def test_corrections_are_those_of_nemo_rl(mode, kind, low, high, level):
    logprobs, data = random_batch()
    bounds = {"importance_floor": low, "importance_cap": high}
    ours = our_loss(logprobs, data, loss_type=level, importance_mode=mode, **bounds)
    tis = {"kind": kind, "low": low, "high": high}
    assert ours == pytest.approx(nemo_loss(logprobs, data, level=level, tis=tis), **TOLERANCE)
    assert ours != pytest.approx(nemo_loss(logprobs, data, level=level), rel=1e-3)


@pytest.mark.parametrize(
    ("mode", "kind"), [("sequence_truncate", "tis"), ("sequence_mask", "icepop")]
)
def test_gspo_is_that_of_nemo_rl(mode, kind):
    logprobs, data = random_batch()
    settings = {"loss_type": "sequence_level", "ratio_level": "sequence", "importance_mode": mode}
    ours = our_loss(logprobs, data, importance_floor=0.7, importance_cap=1.4, **settings)
    tis = {"kind": kind, "low": 0.7, "high": 1.4}
    theirs = nemo_loss(logprobs, data, level="sequence_level", per_sequence=True, tis=tis)
    assert ours == pytest.approx(theirs, **TOLERANCE)


def rewards_of_groups():
    return torch.randn(12, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def nemo_group(rewards, size=4):
    """`GRPOAdvantageEstimator` without leave-one-out, whose deviation here is of the others."""
    groups = np.asarray(rewards).reshape(-1, size)
    mean = groups.mean(1, keepdims=True)
    std = np.sqrt((np.mean(groups**2, axis=1, keepdims=True) - mean**2) * size / (size - 1))
    return ((groups - mean) / (std + 1e-6)).reshape(-1)


def test_group_advantages_are_those_of_nemo_rl():
    rewards = rewards_of_groups()[:, 0]
    ours = group_relative_advantages(rewards, group_size=4).double().numpy()
    np.testing.assert_allclose(ours, nemo_group(rewards), rtol=1e-5, atol=1e-6)


def test_gdpo_advantages_are_those_of_nemo_rl():
    rewards = rewards_of_groups()
    total = nemo_group(rewards[:, 0]) + 0.5 * nemo_group(rewards[:, 1])
    theirs = (total - total.mean()) / total.std(ddof=1)
    ours = whiten(per_reward_advantages(rewards, weights=[1.0, 0.5], group_size=4), correction=1)
    np.testing.assert_allclose(ours.double().numpy(), theirs, rtol=1e-5, atol=1e-5)


def test_whitened_advantages_are_those_of_nemo_rl():
    """`ReinforcePlusPlusAdvantageEstimator`."""
    _, data = random_batch()
    values, mask = data["advantages"].numpy(), data["token_mask"].numpy()
    mean = (values * mask).sum() / mask.sum()
    variance = ((values - mean) ** 2 * mask).sum() / mask.sum()
    theirs = (values - mean) / np.sqrt(max(variance, 1e-8)) * mask
    ours = whiten(data["advantages"], data["token_mask"])
    np.testing.assert_allclose(ours.double().numpy(), theirs, rtol=1e-5, atol=1e-6)
