"""The terms of `ClippedPGLoss` beyond PPO's, each against numbers computed by hand."""

import math

import pytest
import torch
from loss_batches import evaluate, one_token, random_batch, two_rows
from rl_interfaces import LossType
from rl_policy.losses import ClippedPGLoss, estimate_kl
from tolerances import ELEMENTWISE

pytestmark = pytest.mark.promise

SEQUENCE = {"loss_type": "sequence_level"}


def two_tokens(*, ratios=(1.0, 1.0), advantage=1.0, weights=(1.0, 1.0)):
    """Return log-probabilities and a batch of one row `[first token, target, target]`.

    Args:
        ratios: Of the targets, new over old policy.
        advantage: Of the row.
        weights: Of the targets, trainer over sampler.
    """
    prev = torch.tensor([[0.0, math.log(0.25), math.log(0.5)]], dtype=torch.float64)
    shift = torch.tensor([[1.0, *ratios]], dtype=torch.float64).log()
    data = {
        "token_mask": torch.tensor([[0, 1, 1]]),
        "sample_mask": torch.ones(1),
        "advantages": torch.full((1, 3), advantage, dtype=torch.float64),
        "prev_logprobs": prev,
        "generation_logprobs": prev - torch.tensor([[1.0, *weights]], dtype=torch.float64).log(),
    }
    return (prev + shift).requires_grad_(), data


def value_and_gradient(loss_fn, logprobs, data):
    value, metrics = evaluate(loss_fn, logprobs, data)
    value.backward()
    return value.item(), logprobs.grad[0, 1:].tolist(), metrics


@pytest.mark.parametrize(
    ("advantage", "clip_high", "clip_low", "value", "gradient"),
    [
        # s = sqrt(1.5 * 0.9) = 1.1618950; each token has half of its gradient -A s.
        (2.0, 0.2, 0.2, -2.3237900, -1.1618950),
        (-1.0, 0.2, 0.2, 1.1618950, 0.5809475),
        # Beyond the bound of the sequence, though one token's ratio alone is within it.
        (2.0, 0.1, 0.2, -2.2, 0.0),
    ],
)
def test_the_ratio_of_a_sequence_is_its_geometric_mean(
    advantage, clip_high, clip_low, value, gradient
):
    loss_fn = ClippedPGLoss(
        ratio_level="sequence", clip_high=clip_high, clip_low=clip_low, **SEQUENCE
    )
    logprobs, data = two_tokens(ratios=(1.5, 0.9), advantage=advantage)
    found, gradients, metrics = value_and_gradient(loss_fn, logprobs, data)
    assert found == pytest.approx(value, rel=ELEMENTWISE)
    assert gradients == pytest.approx([gradient, gradient], rel=ELEMENTWISE)
    assert metrics["probs_ratio"] == pytest.approx(1.1618950, rel=ELEMENTWISE)
    assert metrics["clip_fraction"] == (gradient == 0)


def test_the_ratio_of_a_sequence_leaves_tokens_out_that_are_no_targets():
    logprobs, data = two_tokens(ratios=(1.5, 0.9), advantage=2.0)
    data["token_mask"][0, 2] = 0
    loss_fn = ClippedPGLoss(ratio_level="sequence", clip_high=None, **SEQUENCE)
    assert value_and_gradient(loss_fn, logprobs, data)[:2] == (
        pytest.approx(-3.0, rel=ELEMENTWISE),
        pytest.approx([-3.0, 0.0], rel=ELEMENTWISE),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip_low", "clip_high", "weight"),
    [
        (1.5, 1.0, 0.2, 0.2, 1.2),
        (1.5, -1.0, 0.2, 0.2, 1.2),
        (0.5, 1.0, 0.2, 0.2, 0.8),
        (0.5, 1.0, None, 0.2, 0.5),
        (9.0, 1.0, None, None, 9.0),
        (1.1, -2.0, 0.2, 0.2, 1.1),
        # REINFORCE: the weight is 1.
        (1.5, 1.0, 0.0, 0.0, 1.0),
    ],
)
def test_in_cispo_a_clipped_token_keeps_its_gradient(ratio, advantage, clip_low, clip_high, weight):
    logprobs, data = one_token(ratio=ratio, advantage=advantage)
    logprob = logprobs[0, 1].item()
    loss_fn = ClippedPGLoss(clipping="cispo", clip_low=clip_low, clip_high=clip_high)
    value, (gradient,), metrics = value_and_gradient(loss_fn, logprobs, data)
    assert value == pytest.approx(-weight * advantage * logprob, rel=ELEMENTWISE)
    assert gradient == pytest.approx(-weight * advantage, rel=ELEMENTWISE)
    assert metrics["clip_fraction"] == (weight != pytest.approx(ratio))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"), [(0.1, -1.0, 0.1), (9.0, 1.0, -9.0), (9.0, -1.0, 9.0)]
)
def test_a_bound_that_is_none_does_not_clip(ratio, advantage, loss):
    logprobs, data = one_token(ratio=ratio, advantage=advantage)
    loss_fn = ClippedPGLoss(clip_low=None, clip_high=None)
    value, (gradient,), _ = value_and_gradient(loss_fn, logprobs, data)
    assert (value, gradient) == (
        pytest.approx(loss, rel=ELEMENTWISE),
        pytest.approx(loss, rel=ELEMENTWISE),
    )


def test_a_constant_length_divides_the_sum_of_each_sequence():
    logprobs, data = two_rows()  # costs 1 + 2 and 4 * 4
    value, metrics = evaluate(ClippedPGLoss(length_divisor=8, **SEQUENCE), logprobs, data)
    value.backward()
    assert value.item() == pytest.approx((3 / 8 + 16 / 8) / 2, rel=ELEMENTWISE)
    assert metrics["policy_loss"] == pytest.approx(1.1875, rel=ELEMENTWISE)
    # The gradient of a token is its cost, over the 8 tokens and the 2 rows.
    assert logprobs.grad[:, 2].tolist() == pytest.approx([1 / 16, 4 / 16], rel=ELEMENTWISE)


@pytest.mark.parametrize(
    ("mode", "floor", "cap", "expected"),
    [
        # Weights 0.5 and 3 of the tokens: product 1.5, geometric mean 1.2247.
        ("token_truncate", None, 2.0, (0.5, 2.0)),
        ("token_truncate", 0.8, 2.0, (0.8, 2.0)),
        ("sequence_truncate", None, 2.0, (1.5, 1.5)),
        ("sequence_truncate", 0.8, 1.25, (1.25, 1.25)),
        ("token_mask", None, 2.0, (0.5, 0.0)),
        ("token_mask", 0.8, 5.0, (0.0, 3.0)),
        ("sequence_mask", None, 1.25, (0.0, 0.0)),
        ("sequence_mask", 0.8, 2.0, (1.5, 1.5)),
        ("geometric_mask", None, 1.2, (0.0, 0.0)),
        ("geometric_mask", 0.9, 1.3, (0.5, 3.0)),
    ],
)
def test_corrections_between_sampler_and_trainer(mode, floor, cap, expected):
    logprobs, data = two_tokens(advantage=-1.0, weights=(0.5, 3.0))
    loss_fn = ClippedPGLoss(importance_mode=mode, importance_floor=floor, importance_cap=cap)
    value, gradient, metrics = value_and_gradient(loss_fn, logprobs, data)
    assert value == pytest.approx(sum(expected) / 2, rel=ELEMENTWISE)
    assert gradient == pytest.approx([weight / 2 for weight in expected], rel=ELEMENTWISE)
    # By token: 0.5 is beyond a floor of 0.8, and 3 beyond a cap of 2.
    of_tokens = [(floor or 0) > 0.5 or cap < 0.5, cap < 3.0]
    of_row = {"sequence": 1.5, "geometric": 1.2247}.get(mode.partition("_")[0])
    outside = [of_row > cap] if of_row else of_tokens
    assert metrics["importance_outside"] == pytest.approx(sum(outside) / len(outside))
    assert metrics["sampler_trainer_ratio"] == pytest.approx(1.75, rel=ELEMENTWISE)


@pytest.mark.parametrize(("weights", "is_kept"), [((0.5, 0.4), False), ((0.9, 0.95), True)])
@pytest.mark.parametrize("mode", ["sequence_mask", "geometric_mask"])
def test_a_lower_bound_of_a_sequence_masks_all_of_its_tokens(mode, weights, is_kept):
    logprobs, data = two_tokens(advantage=-1.0, weights=weights)
    loss_fn = ClippedPGLoss(importance_mode=mode, importance_floor=0.8, importance_cap=1.25)
    value, _, metrics = value_and_gradient(loss_fn, logprobs, data)
    assert (value > 0) == is_kept
    assert metrics["importance_outside"] == (not is_kept)


@pytest.mark.parametrize(
    ("settings", "value", "gradient"),
    [
        # d = log 0.125 - log 0.25 = -0.6931472
        ({"kl_estimator": "k2"}, 0.2402265, 0.6931472),
        ({"kl_estimator": "k3"}, 0.1931472, 0.5),
        # Times the ratio, here 1, whose gradient adds the estimate itself.
        ({"kl_estimator": "k1", "kl_unbiased": True}, 0.6931472, 1.6931472),
        ({"kl_estimator": "k2", "kl_unbiased": True}, 0.2402265, 0.9333737),
        ({"kl_estimator": "k3", "kl_unbiased": True}, 0.1931472, 0.6931472),
        # Clamped, an estimate has no gradient; its ratio does.
        ({"kl_estimator": "k2", "kl_clamp": 0.2}, 0.2, 0.0),
        ({"kl_estimator": "k2", "kl_clamp": 0.5}, 0.2402265, 0.6931472),
        ({"kl_estimator": "k2", "kl_log_ratio_clamp": 0.5}, 0.125, 0.0),
        ({"kl_estimator": "k1", "kl_unbiased": True, "kl_clamp": 0.2}, 0.2, 0.2),
    ],
)
def test_kl_estimators(settings, value, gradient):
    reference = math.log(0.125)
    logprobs, data = one_token(ratio=1.0, advantage=0.0, reference_logprobs=reference)
    loss_fn = ClippedPGLoss(kl_coef=1.0, **settings)
    found, (slope,), metrics = value_and_gradient(loss_fn, logprobs, data)
    assert found == pytest.approx(value, rel=ELEMENTWISE)
    assert slope == pytest.approx(gradient, rel=ELEMENTWISE)
    assert metrics["kl"] == pytest.approx(value, rel=ELEMENTWISE)


def test_an_estimate_is_clamped_from_both_sides():
    log_ratio = torch.tensor([-3.0, 3.0], dtype=torch.float64)
    assert estimate_kl(log_ratio, estimator="k1", clamp=1.0).tolist() == [1.0, -1.0]
    assert estimate_kl(log_ratio, estimator="k1", log_ratio_clamp=2.0).tolist() == [2.0, -2.0]
    assert estimate_kl(log_ratio, estimator="k2").tolist() == [4.5, 4.5]


def test_the_unbiased_penalty_has_the_ratio_of_the_token_where_the_policy_moved():
    reference = math.log(0.125)
    logprobs, data = one_token(ratio=1.5, advantage=0.0, reference_logprobs=reference)
    loss_fn = ClippedPGLoss(kl_coef=0.1, kl_estimator="k1", kl_unbiased=True)
    value, (gradient,), metrics = value_and_gradient(loss_fn, logprobs, data)
    k1 = math.log(1.5 * 0.25) - reference  # 1.0986
    assert value == pytest.approx(0.1 * 1.5 * k1, rel=ELEMENTWISE)
    assert gradient == pytest.approx(0.1 * 1.5 * (k1 + 1), rel=ELEMENTWISE)
    assert metrics["kl"] == pytest.approx(k1, rel=ELEMENTWISE)


def test_the_entropy_bonus():
    logprobs, data = one_token(ratio=2.0, advantage=0.0)  # probability 0.5
    value, (gradient,), metrics = value_and_gradient(
        ClippedPGLoss(entropy_coef=0.1), logprobs, data
    )
    assert value == pytest.approx(-0.1 * 2 * math.log(2), rel=ELEMENTWISE)
    assert gradient == pytest.approx(0.1 * 2 * (1 - math.log(2)), rel=ELEMENTWISE)
    assert metrics["entropy"] == pytest.approx(math.log(2), rel=ELEMENTWISE)
    assert metrics["policy_loss"] == 0


def expected_gradient(loss_fn):
    """Return what the gradient of a sampled token is on average, by the logits of 5 tokens.

    And the exact gradients of entropy and KL(policy || reference), in the same logits.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    tokens = torch.stack([torch.zeros(5), logprobs.detach()], dim=1).requires_grad_()
    data = {
        "token_mask": torch.tensor([[0, 1]] * 5),
        "sample_mask": torch.ones(5),
        "advantages": torch.zeros(5, 2, dtype=torch.float64),
        "prev_logprobs": tokens.detach(),
        "reference_logprobs": torch.stack([torch.zeros(5), reference], dim=1),
    }
    evaluate(loss_fn, tokens, data, toks=1)[0].backward()
    weights = logprobs.exp().detach() * tokens.grad[:, 1]
    (sampled,) = torch.autograd.grad(logprobs, logits, weights, retain_graph=True)
    entropy, kl = (
        -(logprobs.exp() * logprobs).sum(),
        (logprobs.exp() * (logprobs - reference)).sum(),
    )
    exact = [torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (entropy, kl)]
    return sampled, *exact


def test_the_bonus_has_the_gradient_of_the_exact_entropy():
    sampled, entropy, _ = expected_gradient(ClippedPGLoss(entropy_coef=1.0))
    assert entropy.abs().max() > 0.01
    torch.testing.assert_close(sampled, -entropy, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "is_exact"),
    [
        ({"kl_estimator": "k1", "kl_unbiased": True}, True),
        ({"kl_estimator": "k3", "kl_unbiased": True}, True),
        ({"kl_estimator": "k2"}, True),
        # Why `kl_unbiased` is there: the gradient of k3 alone is another one.
        ({"kl_estimator": "k3"}, False),
    ],
)
def test_which_penalties_have_the_gradient_of_the_exact_kl(settings, is_exact):
    sampled, _, kl = expected_gradient(ClippedPGLoss(kl_coef=1.0, **settings))
    assert kl.abs().max() > 0.1
    assert torch.allclose(sampled, kl, rtol=1e-9, atol=1e-12) == is_exact


EVERYTHING = {
    "cispo": {"clipping": "cispo", "clip_low": None, "kl_coef": 0.1, "entropy_coef": 0.1},
    "gspo": {
        "ratio_level": "sequence",
        "importance_mode": "sequence_mask",
        "importance_cap": 2.0,
        "kl_coef": 0.1,
        "kl_unbiased": True,
        **SEQUENCE,
    },
    "dr_grpo": {"length_divisor": 7, "importance_mode": "token_mask", "importance_cap": 1.3}
    | SEQUENCE,
    "geometric": {
        "importance_mode": "geometric_mask",
        "importance_floor": 0.9,
        "importance_cap": 1.1,
        "kl_coef": 0.1,
        "kl_estimator": "k2",
        "kl_clamp": 0.1,
        "entropy_coef": 0.1,
    },
}


@pytest.mark.parametrize("rows_per_micro_batch", [1, 2, 4])
@pytest.mark.parametrize("name", list(EVERYTHING))
def test_micro_batches_add_up_to_the_full_batch(name, rows_per_micro_batch):
    loss_fn = ClippedPGLoss(**EVERYTHING[name])
    logprobs, data = random_batch()
    logprobs.requires_grad_()
    counts = (
        data["sample_mask"].sum(),
        (data["token_mask"][:, 1:].sum(1) * data["sample_mask"]).sum(),
    )
    full, full_metrics = loss_fn(logprobs, data, *counts)
    (full_gradient,) = torch.autograd.grad(full, logprobs)
    total, sums = 0.0, dict.fromkeys(full_metrics, 0.0)
    for start in range(0, 6, rows_per_micro_batch):
        rows = slice(start, start + rows_per_micro_batch)
        chunk = {key: value[rows] for key, value in data.items()}
        value, metrics = loss_fn(logprobs[rows], chunk, *counts)
        total = total + value
        sums = {key: sums[key] + float(metrics[key]) for key in sums}
    (gradient,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(total, full, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(gradient, full_gradient, rtol=1e-12, atol=1e-15)
    expected = {key: float(value) for key, value in full_metrics.items()}
    assert sums == pytest.approx(expected, rel=ELEMENTWISE)


@pytest.mark.parametrize("name", [name for name in EVERYTHING if name != "cispo"])
def test_gradient_against_finite_differences(name):
    """CISPO's gradient is not that of its value, by its definition."""
    logprobs, data = random_batch()
    loss_fn, counts = ClippedPGLoss(**EVERYTHING[name]), (torch.tensor(5.0), torch.tensor(20.0))
    assert torch.autograd.gradcheck(
        lambda values: loss_fn(values, data, *counts)[0], logprobs.requires_grad_()
    )


@pytest.mark.parametrize("name", list(EVERYTHING))
def test_masked_rows_and_tokens_have_no_value_and_no_gradient(name):
    logprobs, data = two_rows()
    data["sample_mask"] = torch.tensor([1.0, 0.0])
    for column in ("prev_logprobs", "generation_logprobs", "reference_logprobs"):
        data[column] = data["prev_logprobs"].clone()
        data[column][data["token_mask"] == 0] = -1e30  # an overflow if it were read
        data[column][1] = -1e30
    changed = {**EVERYTHING[name], "importance_cap": 2.0}
    value, metrics = evaluate(ClippedPGLoss(**changed), logprobs, data)
    value.backward()
    assert value.isfinite()
    assert all(torch.as_tensor(each).isfinite() for each in metrics.values())
    assert torch.equal(logprobs.grad[1], torch.zeros(5))
    assert torch.equal(logprobs.grad[0] != 0, data["token_mask"][0] == 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"importance_floor": 1.5, "importance_cap": 2.0}, r"importance_floor=1.5 must lie in"),
        ({"importance_floor": 0.5}, "importance_floor=0.5 needs importance_cap"),
        ({"length_divisor": 0, **SEQUENCE}, "length_divisor=0 must be positive"),
        ({"length_divisor": 5}, "length_divisor=5 contradicts loss_type='token_level'"),
        ({"kl_clamp": 0}, "kl_clamp=0 must be positive"),
        ({"kl_log_ratio_clamp": -1}, "kl_log_ratio_clamp=-1 must be positive"),
        ({"entropy_coef": -0.1}, "entropy_coef=-0.1 must not be negative"),
        ({"ratio_level": "sequence"}, "ratio_level='sequence' contradicts loss_type='token_level'"),
        ({"ratio_level": "word"}, "ratio_level='word' must be one of token, sequence"),
        ({"clipping": "none"}, "clipping='none' must be one of ppo, cispo"),
        ({"kl_estimator": "k4"}, "kl_estimator='k4' must be one of k1, k2, k3"),
        ({"importance_mode": "mask"}, "importance_mode='mask' must be one of token_truncate"),
        ({"clipping": "cispo", "dual_clip": 3.0}, "dual_clip=3.0 contradicts clipping='cispo'"),
        (
            {
                "ratio_level": "sequence",
                "importance_mode": "token_mask",
                "importance_cap": 2.0,
                **SEQUENCE,
            },
            "importance_mode='token_mask' contradicts ratio_level='sequence'",
        ),
        (
            {"kl_coef": 0.1, "kl_estimator": "k1"},
            "kl_estimator='k1' contradicts kl_coef=0.1 in the loss",
        ),
    ],
)
def test_settings_out_of_range_or_without_meaning_are_named(arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        ClippedPGLoss(**arguments)
    assert "\n" not in str(raised.value)


def test_what_contradicts_only_where_it_acts_is_accepted():
    assert ClippedPGLoss(kl_estimator="k1").kl_coef == 0  # measured alone
    assert (
        ClippedPGLoss(ratio_level="sequence", importance_mode="token_mask", **SEQUENCE).loss_type
        is LossType.SEQUENCE_LEVEL
    )
