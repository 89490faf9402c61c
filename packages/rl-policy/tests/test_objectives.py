"""Presets, and the advantages of a step, against numbers computed by hand."""

import pytest
import torch
import yaml
from rl_interfaces import LossType
from rl_policy.config import (
    load_run_config,
    override_resumed,
    parse_run_config,
    render_run_config,
)
from rl_policy.data.rewards import Rewards
from rl_policy.losses import ClippedPGLoss
from rl_policy.recipes.grpo_config import PRESETS, GrpoSection, LossSection
from rl_policy.recipes.policy_gradient.config import build_loss
from rl_policy.recipes.policy_gradient.objectives import (
    mean_advantages,
    reward_columns,
    step_advantages,
)

TWO_REWARDS = ["reward.function=[a.py:x, b.py:y]"]
# 1e-6 is added to standard deviations of 0.27 and more, of advantages up to 3.3.
TOLERANCE = {"rtol": 0, "atol": 2e-5}


def load(preset, *overrides):
    given = [f"loss.preset={preset}", *overrides, *(TWO_REWARDS if preset == "gdpo" else [])]
    return load_run_config("grpo", overrides=given)


def loss_of(config):
    return build_loss(config.section(LossSection), max_new_tokens=6)


SEQUENCE = {"loss_type": LossType.SEQUENCE_LEVEL, "importance_cap": 2.0}
SEQUENCE_RATIO = {"ratio_level": "sequence", "importance_mode": "sequence_truncate"}
LOSSES = {
    "grpo": {**SEQUENCE, "kl_coef": 0.04},
    "dapo": {"importance_cap": 2.0, "clip_high": 0.28},
    "dr_grpo": {**SEQUENCE, "length_divisor": 6},
    "gspo": {**SEQUENCE, **SEQUENCE_RATIO, "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"importance_cap": 2.0, "clipping": "cispo", "clip_low": None, "clip_high": 4.0},
    # The penalty is in the reward, so not in the loss, which estimates it by the same estimator.
    "rloo": {
        **SEQUENCE,
        "clipping": "cispo",
        "clip_low": 0.0,
        "clip_high": 0.0,
        "length_divisor": 1,
        "kl_estimator": "k1",
    },
    "reinforce_pp": {"importance_cap": 2.0, "kl_estimator": "k1"},
    "reinforce_pp_baseline": {"importance_cap": 2.0, "kl_coef": 0.001, "kl_estimator": "k2"},
    "gdpo": {**SEQUENCE, "kl_coef": 0.001},
    "icepop": {
        "loss_type": LossType.SEQUENCE_LEVEL,
        "importance_cap": 5.0,
        "importance_floor": 0.5,
        "importance_mode": "token_mask",
    },
}


@pytest.mark.parametrize("preset", list(LOSSES))
def test_a_preset_is_the_loss_of_its_paper(preset):
    assert set(LOSSES) == set(PRESETS)
    assert loss_of(load(preset)) == ClippedPGLoss(**LOSSES[preset])


@pytest.mark.parametrize("preset", list(LOSSES))
def test_what_is_shown_of_a_preset_is_what_it_stands_for(preset):
    config = load(preset)
    shown = yaml.safe_load(render_run_config(config))
    for section, keys in PRESETS[preset].items():
        assert {key: shown[section][key] for key in keys} == keys
    # Written and read again, as a run that is resumed does, it is the same.
    assert parse_run_config(shown) == config
    longer = override_resumed(config, ["grpo.steps=99"])
    assert longer.section(LossSection) == config.section(LossSection)


def test_a_key_beside_a_preset_takes_precedence():
    config = load("dapo", "loss.clip_high=0.5", "grpo.dynamic_sampling=0", "loss.kl_coef=0.2")
    assert loss_of(config) == ClippedPGLoss(clip_high=0.5, kl_coef=0.2, importance_cap=2.0)
    grpo = config.section(GrpoSection)
    assert (grpo.dynamic_sampling, grpo.overlong_share) == (0, 0.2)
    assert load("dr_grpo", "loss.length_divisor=null").section(LossSection).length_divisor is None
    assert loss_of(load("dr_grpo", "loss.length_divisor=9")).length_divisor == 9


def test_without_a_preset_nothing_has_changed():
    config = load_run_config("grpo")
    assert loss_of(config) == ClippedPGLoss(clip_high=0.28, kl_coef=0.001, importance_cap=2.0)
    grpo = config.section(GrpoSection)
    assert (grpo.group_baseline, grpo.leave_one_out, grpo.divide_by_std) == (True, False, True)
    assert (grpo.whiten, grpo.dynamic_sampling, grpo.overlong_share) == (None, 0, 0.0)


def step_batch():
    """Return four completions of 1, 2, 3 and 6 tokens behind a prompt of one token."""
    lengths = torch.tensor([1, 2, 3, 6])
    positions = torch.arange(7)
    mask = ((positions >= 1) & (positions <= lengths[:, None])).long()
    log_ratio = torch.tensor([0.5, 0.25, 0.0, -0.1])[:, None].expand(4, 7)
    prev = torch.full((4, 7), -1.0)
    return {
        "token_mask": mask,
        "sample_mask": torch.ones(4),
        "prev_logprobs": prev,
        # Beyond the targets it must not be read.
        "reference_logprobs": torch.where(mask > 0, prev - log_ratio, torch.inf),
    }


def advantages_of(*overrides, rewards=(1.0, 0.0, 0.0, 0.0), preset=None):
    given = ["grpo.samples_per_prompt=4", *overrides]
    given += [] if preset is None else [f"loss.preset={preset}"]
    config = load_run_config("grpo", overrides=given)
    batch = step_batch()
    found, measured = step_advantages(batch, rewards, config=config)
    assert (found.shape, found.dtype) == ((4, 7), torch.float32)
    return found, measured, batch


def per_sample(*values):
    return torch.tensor(values)[:, None].expand(4, 7)


def test_by_default_they_are_the_groups_for_each_token():
    found, measured, _ = advantages_of()
    torch.testing.assert_close(found, per_sample(1.5, -0.5, -0.5, -0.5), **TOLERANCE)
    assert measured == {}


def test_leave_one_out_and_no_standard_deviation():
    overrides = ["grpo.leave_one_out=true", "grpo.divide_by_std=false"]
    found, _, _ = advantages_of(*overrides)
    torch.testing.assert_close(found, per_sample(1.0, -1 / 3, -1 / 3, -1 / 3), **TOLERANCE)


def test_a_penalty_in_the_reward_comes_before_the_baseline():
    # KL by k1 per completion: 1 * 0.5, 2 * 0.25, 0, 6 * -0.1. Rewards 0.95, -0.05, 0, 0.06.
    found, measured, _ = advantages_of(preset="rloo", rewards=(1.0, 0.0, 0.0, 0.0))
    rewards = [1 - 0.05 * 0.5, -0.05 * 0.5, 0.0, 0.05 * 0.6]
    expected = [each - (sum(rewards) - each) / 3 for each in rewards]
    torch.testing.assert_close(found, per_sample(*expected), **TOLERANCE)
    assert measured == {"reward_kl": pytest.approx((0.5 + 0.5 + 0.0 - 0.6) / 4)}


def test_clamps_act_on_a_penalty_in_the_reward():
    overrides = ["loss.kl_clamp=0.1", "loss.kl_coef=1.0"]
    _, measured, _ = advantages_of(*overrides, preset="rloo")
    assert measured == {"reward_kl": pytest.approx((0.1 + 0.2 + 0.0 - 0.6) / 4)}


def test_reinforce_pp_charges_each_token_with_the_penalty_from_there_on_and_whitens():
    found, _, batch = advantages_of("loss.kl_coef=0.1", preset="reinforce_pp")
    mask = batch["token_mask"].bool()
    raw = torch.zeros(4, 7)
    raw[0, 1] = 1 - 0.1 * 0.5
    raw[1, 1:3] = -0.1 * torch.tensor([0.5, 0.25])
    raw[3, 1:7] = 0.1 * 0.1 * torch.arange(6, 0, -1)
    values = raw[mask]
    expected = (raw - values.mean()) / values.std(correction=0) * mask
    torch.testing.assert_close(found * mask, expected, **TOLERANCE)
    assert found[mask].mean().abs() < 1e-6


def test_with_a_baseline_rewards_are_compared_within_the_group_and_whitened_over_tokens():
    found, _, batch = advantages_of(preset="reinforce_pp_baseline")
    # 0.75 for 1 token and -0.25 for 11: mean -1/6, standard deviation 0.2763854.
    mask = batch["token_mask"]
    expected = per_sample(0.9166667, -0.0833333, -0.0833333, -0.0833333) / 0.2763854 * mask
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_each_reward_is_normalised_and_the_sum_whitened():
    parts = {"x": [1.0, 0.0, 0.0, 0.0], "y": [0.0, 0.0, 0.0, 10.0]}
    overrides = [*TWO_REWARDS, "reward.weights=[1.0, 2.0]"]
    rewards = Rewards([1.0, 0.0, 0.0, 20.0], parts)
    found, _, _ = advantages_of(*overrides, preset="gdpo", rewards=rewards)
    total = torch.tensor([1.5 - 1.0, -1.5, -1.5, -0.5 + 3.0])
    expected = (total - total.mean()) / total.std()
    torch.testing.assert_close(found, per_sample(*expected.tolist()), **TOLERANCE)


def test_the_overlong_penalty_is_a_part_of_the_reward():
    # 6 tokens at most, the last 3 of them penalised: the fourth completion by 0.5 * 1.
    overrides = ["grpo.overlong_share=0.5", "grpo.overlong_penalty=0.5", "grpo.divide_by_std=false"]
    found, measured, _ = advantages_of(*overrides)
    expected = torch.tensor([1.0, 0.0, 0.0, -0.5]) - 0.125
    torch.testing.assert_close(found, per_sample(*expected.tolist()), **TOLERANCE)
    assert measured == {"overlong_penalty": pytest.approx(-0.125)}


def test_beside_several_rewards_the_penalty_is_one_more_of_weight_1():
    parts = {"x": [1.0, 0.0, 0.0, 0.0], "y": [0.0, 0.0, 0.0, 0.0]}
    overrides = [*TWO_REWARDS, "reward.weights=[1.0, 2.0]", "grpo.overlong_share=0.5"]
    found, _, _ = advantages_of(*overrides, preset="gdpo", rewards=Rewards([1.0, 0, 0, 0], parts))
    total = torch.tensor([1.5, -0.5, -0.5, -0.5]) + torch.tensor([0.5, 0.5, 0.5, -1.5])
    expected = (total - total.mean()) / total.std()
    torch.testing.assert_close(found, per_sample(*expected.tolist()), **TOLERANCE)


def test_rows_that_are_masked_have_no_part_in_whitening():
    config = load_run_config("grpo", overrides=["loss.preset=reinforce_pp", "loss.kl_coef=0"])
    batch = step_batch()
    batch["sample_mask"][0] = 0
    found, _ = step_advantages(batch, [9.0, 1.0, 0.0, 0.0], config=config)
    # Of 11 tokens, 2 have the reward 1: mean 2 / 11, standard deviation sqrt(2 / 11 * 9 / 11).
    std = (2 * 9) ** 0.5 / 11
    assert found[0].tolist() == [0.0] * 7
    assert found[1, 1].item() == pytest.approx(9 / 11 / std, abs=1e-5)


def test_what_is_recorded_of_an_advantage_is_its_mean():
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
    values = torch.tensor([[9.0, 1.0, 2.0, 6.0], [9.0, 9.0, 0.1, 9.0], [9.0, 9.0, 9.0, 9.0]])
    assert torch.equal(mean_advantages(values, mask), torch.tensor([3.0, 0.1, 0.0]))
    constant = torch.full((1, 7), 0.1).expand(1, 7)
    assert torch.equal(mean_advantages(constant, torch.ones(1, 7)), torch.tensor([0.1]))


def test_rewards_as_columns():
    assert reward_columns([1.0, 0.0]).tolist() == [[1.0], [0.0]]
    parts = {"x": [1.0, 0.0], "y": [2.0, 3.0]}
    assert reward_columns(Rewards([3.0, 3.0], parts)).tolist() == [[1.0, 2.0], [0.0, 3.0]]
