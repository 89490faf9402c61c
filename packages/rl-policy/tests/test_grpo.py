import logging

import pytest
from rl_interfaces import LossType
from rl_policy.config import load_run_config
from rl_policy.losses import ClippedPGLoss
from rl_policy.recipes.grpo_config import LossSection
from rl_policy.recipes.policy_gradient.config import build_loss
from rl_policy.recipes.policy_gradient.step import warn_of_truncation


def test_the_section_loss_becomes_the_loss():
    overrides = ["loss.clip_low=0.1", "loss.dual_clip=3", "loss.loss_type=sequence_level"]
    section = load_run_config("grpo", overrides=overrides).section(LossSection)
    assert build_loss(section, max_new_tokens=6) == ClippedPGLoss(
        clip_low=0.1,
        clip_high=0.28,
        dual_clip=3,
        kl_coef=0.001,
        importance_cap=2.0,
        loss_type=LossType.SEQUENCE_LEVEL,
    )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([], []),
        (["policy.generation.top_k=5"], ["policy.generation.top_k=5"]),
        # The least that there is, which is no probability of 1.
        (["policy.generation.top_k=1"], ["policy.generation.top_k=1"]),
        (
            ["policy.generation.top_k=5", "policy.generation.top_p=0.9"],
            ["policy.generation.top_k=5", "policy.generation.top_p=0.9"],
        ),
    ],
)
def test_a_truncating_sampler_is_warned_about_once(caplog, overrides, named):
    generation = load_run_config("grpo", overrides=overrides).policy["generation"]
    with caplog.at_level(logging.WARNING):
        warn_of_truncation(generation)
    assert len(caplog.records) == bool(named)
    assert all(name in caplog.text for name in named)
