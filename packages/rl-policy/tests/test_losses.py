import math
import pickle

import pytest
import torch
from loss_batches import evaluate, one_token, random_batch, two_rows
from rl_interfaces import LossFunction, LossInput, LossType
from rl_policy.losses import ClippedPGLoss, DPOLoss, NLLLoss, group_relative_advantages
from tolerances import ELEMENTWISE

pytestmark = pytest.mark.promise

# Hand-computed numbers are written in float64 and compared with float32 results.
TOLERANCE = {"rtol": ELEMENTWISE, "atol": ELEMENTWISE}
REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0, 4.0, 6.0, 8.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # Inside the bounds the loss is -r A and its gradient with respect to log p is -r A too.
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -1.0, 0.9, 0.9),
        # Beyond a bound that would be an improvement, the loss stands still.
        (1.5, 2.0, -2.4, 0.0),
        (0.5, -1.0, 0.8, 0.0),
        # Beyond a bound that makes matters worse, it does not.
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -1.0, 1.5, 1.5),
    ],
)
def test_clipping(ratio, advantage, loss, gradient):
    logprobs, batch = one_token(ratio=ratio, advantage=advantage)
    value, metrics = evaluate(ClippedPGLoss(clip_low=0.2, clip_high=0.2), logprobs, batch)
    value.backward()
    assert value.item() == pytest.approx(loss, rel=ELEMENTWISE)
    assert logprobs.grad[0, 1].item() == pytest.approx(gradient, rel=ELEMENTWISE)
    assert metrics["clip_fraction"] == (gradient == 0.0)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.25, 1.0), (0.75, -1.0)])
def test_a_ratio_exactly_at_a_bound_is_not_clipped(ratio, advantage):
    logprobs, batch = one_token(ratio=1.0, advantage=advantage)
    # exp(log r) is not r in floating point: the bound is put where the ratio comes out.
    logprobs = (batch["prev_logprobs"] + torch.tensor([[0.0, math.log(ratio)]])).requires_grad_()
    exact = (logprobs - batch["prev_logprobs"]).exp()[0, 1].item()
    loss_fn = ClippedPGLoss(clip_low=abs(1 - exact), clip_high=abs(exact - 1))
    value, metrics = evaluate(loss_fn, logprobs, batch)
    value.backward()
    assert value.item() == pytest.approx(-exact * advantage, rel=1e-12)
    assert logprobs.grad[0, 1].item() == pytest.approx(-exact * advantage, rel=1e-12)
    assert metrics["clip_fraction"] == 0.0


def test_the_two_bounds_are_independent():
    loss_fn = ClippedPGLoss(clip_low=0.1, clip_high=0.4)
    above, batch = one_token(ratio=2.0, advantage=1.0)
    assert evaluate(loss_fn, above, batch)[0].item() == pytest.approx(-1.4, rel=ELEMENTWISE)
    below, batch = one_token(ratio=0.2, advantage=-1.0)
    assert evaluate(loss_fn, below, batch)[0].item() == pytest.approx(0.9, rel=ELEMENTWISE)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (10.0, -2.0, 6.0, 0.0),  # -r A = 20 is above 3 * 2
        (2.0, -2.0, 4.0, 4.0),  # 4 is not
        (10.0, 2.0, -2.4, 0.0),  # a positive advantage is bounded by clip_high alone
        (0.1, 2.0, -0.2, -0.2),
    ],
)
def test_dual_clip_bounds_the_cost_of_a_negative_advantage(ratio, advantage, loss, gradient):
    logprobs, batch = one_token(ratio=ratio, advantage=advantage)
    value, metrics = evaluate(ClippedPGLoss(dual_clip=3.0), logprobs, batch)
    value.backward()
    assert value.item() == pytest.approx(loss, rel=ELEMENTWISE)
    assert logprobs.grad[0, 1].item() == pytest.approx(gradient, rel=ELEMENTWISE)
    assert metrics["clip_fraction"] == (gradient == 0.0)


def test_kl_penalty_is_k3_against_the_reference():
    # d = log q - log p = log 0.5: k3 = 0.5 + log 2 - 1, and dk3/dlog p = 1 - exp(d) = 0.5.
    reference = math.log(0.25) + math.log(0.5)
    logprobs, batch = one_token(ratio=1.0, advantage=0.0, reference_logprobs=reference)
    value, metrics = evaluate(ClippedPGLoss(kl_coef=0.1), logprobs, batch)
    value.backward()
    k3 = 0.5 + math.log(2) - 1
    assert value.item() == pytest.approx(0.1 * k3, rel=ELEMENTWISE)
    assert metrics["kl"] == pytest.approx(k3, rel=ELEMENTWISE)
    assert logprobs.grad[0, 1].item() == pytest.approx(0.1 * 0.5, rel=ELEMENTWISE)


def test_kl_is_measured_without_a_penalty_where_there_is_a_reference():
    logprobs, batch = one_token(ratio=1.0, advantage=1.0, reference_logprobs=math.log(0.125))
    value, metrics = evaluate(ClippedPGLoss(), logprobs, batch)
    assert value.item() == pytest.approx(-1.0, rel=ELEMENTWISE)
    assert metrics["kl"] == pytest.approx(0.5 + math.log(2) - 1, rel=ELEMENTWISE)


@pytest.mark.parametrize(("trainer_over_sampler", "weight"), [(0.5, 0.5), (1.5, 1.5), (9.0, 2.0)])
def test_importance_correction_is_truncated(trainer_over_sampler, weight):
    sampler = math.log(0.25) - math.log(trainer_over_sampler)
    logprobs, batch = one_token(ratio=1.1, advantage=1.0, generation_logprobs=sampler)
    value, metrics = evaluate(ClippedPGLoss(importance_cap=2.0), logprobs, batch)
    value.backward()
    assert value.item() == pytest.approx(-1.1 * weight, rel=ELEMENTWISE)
    assert logprobs.grad[0, 1].item() == pytest.approx(-1.1 * weight, rel=ELEMENTWISE)
    assert metrics["sampler_trainer_ratio"] == pytest.approx(trainer_over_sampler, rel=ELEMENTWISE)


def test_the_penalty_is_not_weighted_by_the_importance():
    logprobs, batch = one_token(
        ratio=1.0,
        advantage=1.0,
        generation_logprobs=math.log(0.125),
        reference_logprobs=math.log(0.125),
    )
    value, _ = evaluate(ClippedPGLoss(importance_cap=4.0, kl_coef=1.0), logprobs, batch)
    assert value.item() == pytest.approx(-2.0 + 0.5 + math.log(2) - 1, rel=ELEMENTWISE)


def test_token_level_reduction_is_the_mean_over_tokens():
    logprobs, batch = two_rows()
    value, metrics = evaluate(ClippedPGLoss(), logprobs, batch)
    assert value.item() == pytest.approx((1 + 2 + 4 * 4) / 6, rel=ELEMENTWISE)
    assert metrics["policy_loss"] == pytest.approx(19 / 6, rel=ELEMENTWISE)
    assert metrics["entropy"] == pytest.approx((2 + 3 + 4) / 6, rel=ELEMENTWISE)
    assert metrics["probs_ratio"] == pytest.approx(1.0)
    assert metrics["num_valid_samples"] == 2


def test_sequence_level_reduction_is_the_mean_over_sequences_of_the_mean_over_tokens():
    logprobs, batch = two_rows()
    loss_fn = ClippedPGLoss(loss_type=LossType.SEQUENCE_LEVEL)
    value, metrics = evaluate(loss_fn, logprobs, batch)
    assert value.item() == pytest.approx(((1 + 2) / 2 + 4) / 2, rel=ELEMENTWISE)
    assert metrics["policy_loss"] == pytest.approx(2.75, rel=ELEMENTWISE)


@pytest.mark.parametrize("loss_type", list(LossType))
def test_masked_rows_and_tokens_have_no_value_and_no_gradient(loss_type):
    logprobs, batch = two_rows()
    batch["sample_mask"] = torch.tensor([1.0, 0.0])
    wild = batch["prev_logprobs"].clone()
    wild[batch["token_mask"] == 0] = -1e30  # an overflow if it were read
    wild[1] = -1e30
    batch["prev_logprobs"] = batch["generation_logprobs"] = batch["reference_logprobs"] = wild
    loss_fn = ClippedPGLoss(loss_type=loss_type, kl_coef=0.1, importance_cap=2.0)
    value, metrics = evaluate(loss_fn, logprobs, batch)
    value.backward()
    assert value.item() == pytest.approx(1.5, rel=ELEMENTWISE)
    assert metrics["num_valid_samples"] == 1
    assert torch.equal(logprobs.grad[1], torch.zeros(5))
    assert torch.equal(logprobs.grad[0] != 0, batch["token_mask"][0] == 1)


def test_a_target_at_position_0_is_no_target():
    logprobs, batch = two_rows()
    batch["token_mask"][:, 0] = 1
    value, _ = evaluate(ClippedPGLoss(), logprobs, batch)
    assert value.item() == pytest.approx(19 / 6, rel=ELEMENTWISE)


LOSSES = [
    ClippedPGLoss(clip_high=0.28, dual_clip=3.0, kl_coef=0.1, importance_cap=2.0),
    ClippedPGLoss(kl_coef=0.1, loss_type=LossType.SEQUENCE_LEVEL),
    NLLLoss(),
]


@pytest.mark.parametrize("loss_fn", LOSSES, ids=["token", "sequence", "nll"])
@pytest.mark.parametrize("rows_per_micro_batch", [1, 2, 4])
def test_micro_batches_add_up_to_the_full_batch(loss_fn, rows_per_micro_batch):
    logprobs, batch = random_batch()
    logprobs.requires_grad_()
    seqs = batch["sample_mask"].sum()
    toks = (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum()
    full, full_metrics = loss_fn(logprobs, batch, seqs, toks)
    (full_gradient,) = torch.autograd.grad(full, logprobs)
    total, sums = torch.zeros((), dtype=torch.float64), dict.fromkeys(full_metrics, 0.0)
    for start in range(0, 6, rows_per_micro_batch):
        rows = slice(start, start + rows_per_micro_batch)
        micro_batch = {key: value[rows] for key, value in batch.items()}
        value, metrics = loss_fn(logprobs[rows], micro_batch, seqs, toks)
        total = total + value
        sums = {key: sums[key] + metrics[key] for key in sums}
    (gradient,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(total, full, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, full_gradient, rtol=1e-12, atol=0)
    found, expected = ({k: float(v) for k, v in each.items()} for each in (sums, full_metrics))
    assert found == pytest.approx(expected, rel=ELEMENTWISE)  # some metrics are float32


@pytest.mark.parametrize("loss_type", list(LossType))
def test_gradient_against_finite_differences(loss_type):
    logprobs, batch = random_batch()
    loss_fn = ClippedPGLoss(kl_coef=0.1, importance_cap=2.0, dual_clip=3.0, loss_type=loss_type)
    counts = torch.tensor(5.0), torch.tensor(20.0)
    assert torch.autograd.gradcheck(
        lambda values: loss_fn(values, batch, *counts)[0], logprobs.requires_grad_()
    )


def test_nll_is_the_mean_over_target_tokens():
    logprobs, batch = two_rows()
    value, metrics = evaluate(NLLLoss(), logprobs, batch)
    value.backward()
    assert value.item() == pytest.approx((2 + 3 + 4) / 6, rel=ELEMENTWISE)
    assert metrics == {"nll": pytest.approx(1.5, rel=ELEMENTWISE), "num_valid_samples": 2}
    torch.testing.assert_close(logprobs.grad, -batch["token_mask"] / 6, **TOLERANCE)


@pytest.mark.parametrize("loss_fn", LOSSES, ids=["token", "sequence", "nll"])
def test_a_batch_without_targets_costs_nothing(loss_fn):
    logprobs, batch = random_batch()
    batch["sample_mask"] = torch.zeros(6)
    value, metrics = evaluate(loss_fn, logprobs.requires_grad_(), batch)
    assert value.item() == 0.0
    assert {float(value) for value in metrics.values()} == {0.0}


@pytest.mark.parametrize("loss_fn", LOSSES, ids=["token", "sequence", "nll"])
def test_losses_travel_and_keep_the_protocol(loss_fn):
    assert isinstance(loss_fn, LossFunction)
    assert loss_fn.input_type is LossInput.LOGPROBS
    assert pickle.loads(pickle.dumps(loss_fn)) == loss_fn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_low": 1.0}, r"clip_low=1.0 must lie in \[0, 1\)"),
        ({"clip_low": -0.1}, r"clip_low=-0.1 must lie in \[0, 1\)"),
        ({"clip_high": -0.1}, "clip_high=-0.1 must not be negative"),
        ({"dual_clip": 1.0}, "dual_clip=1.0 must be greater than 1"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0 must not be negative"),
        ({"importance_cap": 0.5}, "importance_cap=0.5 must be at least 1"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ClippedPGLoss(**arguments)


@pytest.mark.parametrize(
    ("loss_fn", "key"),
    [
        (NLLLoss(), "token_mask"),
        (NLLLoss(), "sample_mask"),
        (ClippedPGLoss(), "prev_logprobs"),
        (ClippedPGLoss(kl_coef=0.1), "reference_logprobs"),
        (ClippedPGLoss(importance_cap=2.0), "generation_logprobs"),
    ],
)
def test_a_missing_key_is_named(loss_fn, key):
    logprobs, batch = random_batch()
    del batch[key]
    with pytest.raises(ValueError, match=f"needs the key '{key}'"):
        loss_fn(logprobs, batch, torch.tensor(5), torch.tensor(20))


def test_a_column_of_another_width_is_named():
    logprobs, batch = random_batch()
    batch["advantages"] = batch["advantages"][:, :-1]
    with pytest.raises(ValueError, match=r"advantages has shape \(6, 6\).*\(6, 7\)"):
        ClippedPGLoss()(logprobs, batch, torch.tensor(5), torch.tensor(20))


def test_the_level_may_be_named_as_in_a_config():
    assert ClippedPGLoss(loss_type="sequence_level").loss_type is LossType.SEQUENCE_LEVEL
    with pytest.raises(ValueError, match="'by_token' is not a valid LossType"):
        ClippedPGLoss(loss_type="by_token")


def pairs():
    """Return two pairs whose summed log-ratios are +2, -1 and 0.5, 1.5, and their batch."""
    ratios = torch.tensor([[9.0, 1.5, 0.5], [9.0, -1.0, 7.0], [9.0, 0.5, 7.0], [9.0, 1.0, 0.5]])
    reference = torch.full((4, 3), -2.0)
    batch = {
        "token_mask": torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 0], [0, 1, 1]]),
        "sample_mask": torch.ones(4),
        "reference_logprobs": reference,
    }
    return (reference + ratios).requires_grad_(), batch


@pytest.mark.parametrize(
    ("beta", "label_smoothing", "losses"),
    [
        # Margins 0.5 * 3 and 0.5 * (-1): log(1 + exp(-1.5)) and log(1 + exp(0.5)).
        (0.5, 0.0, (0.2014132780, 0.9740769842)),
        # 0.9 of those, and 0.1 of log(1 + exp(1.5)) and log(1 + exp(-0.5)).
        (0.5, 0.1, (0.3514132780, 0.9240769842)),
        # Margins 3 and -1: log(1 + exp(-3)) and log(1 + exp(1)).
        (1.0, 0.0, (0.0485873516, 1.3132616875)),
    ],
)
def test_dpo_against_hand_computed_values(beta, label_smoothing, losses):
    logprobs, batch = pairs()
    loss_fn = DPOLoss(beta=beta, label_smoothing=label_smoothing)
    value, metrics = evaluate(loss_fn, logprobs, batch)
    value.backward()
    assert value.item() == pytest.approx(sum(losses) / 2, rel=ELEMENTWISE)
    assert metrics == {
        "reward_margin": pytest.approx(beta * (3 - 1) / 2, rel=ELEMENTWISE),
        "chosen_reward": pytest.approx(beta * (2 + 0.5) / 2, rel=ELEMENTWISE),
        "rejected_reward": pytest.approx(beta * (-1 + 1.5) / 2, rel=ELEMENTWISE),
        "pair_accuracy": 0.5,
        "num_valid_samples": 4,
    }
    # The chosen rows are pushed up, the rejected ones down, at target tokens alone.
    assert torch.equal(logprobs.grad != 0, batch["token_mask"] == 1)
    assert (logprobs.grad[0::2] <= 0).all()
    assert (logprobs.grad[1::2] >= 0).all()


def test_masked_pairs_have_no_part_in_dpo():
    logprobs, batch = pairs()
    batch["sample_mask"] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    value, metrics = evaluate(DPOLoss(beta=0.5), logprobs, batch)
    assert value.item() == pytest.approx(0.2014132780, rel=ELEMENTWISE)
    assert (metrics["pair_accuracy"], metrics["num_valid_samples"]) == (1.0, 2)


def test_what_is_no_pair_is_named():
    logprobs, batch = pairs()
    with pytest.raises(ValueError, match="3 rows, which are no pairs"):
        evaluate(DPOLoss(), logprobs[:3], {key: value[:3] for key, value in batch.items()})
    batch["sample_mask"] = torch.tensor([1.0, 0.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="sample_mask differs between the two rows"):
        evaluate(DPOLoss(), logprobs, batch)
    with pytest.raises(ValueError, match=r"beta=0 must be positive"):
        DPOLoss(beta=0)
    with pytest.raises(ValueError, match=r"label_smoothing=0.5 must lie in \[0, 0.5\)"):
        DPOLoss(label_smoothing=0.5)


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
    torch.testing.assert_close(advantages, torch.tensor(expected), **TOLERANCE)


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
