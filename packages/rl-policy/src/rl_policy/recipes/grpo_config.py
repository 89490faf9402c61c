"""The configuration of GRPO: its sections, presets, and the checks that join keys of several.

A preset names a combination of keys of the sections `loss` and `grpo` as a paper has it. Keys that
are given beside it take precedence, and `--show-config` shows the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from rl_interfaces.config.resolve import merge_sections
from rl_interfaces.config.schema import MOST

from rl_policy.config import (
    EnvironmentSection,
    RefitSection,
    RewardSection,
    RunConfig,
    Settings,
)
from rl_policy.environments.pool import GivenEnvironment
from rl_policy.generation.vllm.config import complete_section
from rl_policy.recipes.policy_gradient.async_rollouts import AsyncPlan, AsyncSection
from rl_policy.recipes.policy_gradient.config import (
    PolicyGradientSection,
    PolicyLossSection,
    check_rollouts,
)

PresetName = Literal[
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gdpo",
    "icepop",
]

# What a preset starts from, so that it does not depend on the sections' own defaults. How the
# sampler is corrected is not a part of it.
_PLAIN: Settings = {
    "loss": {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "ratio_level": "token",
        "clipping": "ppo",
        "loss_type": "token_level",
        "length_divisor": None,
        "kl_coef": 0.0,
        "kl_in": "loss",
        "kl_estimator": "k3",
        "kl_unbiased": False,
        "entropy_coef": 0.0,
    },
    "grpo": {
        "group_baseline": True,
        "leave_one_out": False,
        "divide_by_std": True,
        "normalize_each_reward": False,
        "whiten": None,
        "dynamic_sampling": 0,
        "overlong_share": 0.0,
    },
}
_CHANGES: Mapping[PresetName, Settings] = {
    # Shao et al. 2024: sequence means, and the penalty of section 4.2.
    "grpo": {"loss": {"loss_type": "sequence_level", "kl_coef": 0.04}},
    # Yu et al. 2025. The buffer of 4,096 of 20,480 tokens is theirs, the number of rounds ours.
    "dapo": {"loss": {"clip_high": 0.28}, "grpo": {"dynamic_sampling": 4, "overlong_share": 0.2}},
    # Liu et al. 2025.
    "dr_grpo": {
        "loss": {"loss_type": "sequence_level", "length_divisor": "max_new_tokens"},
        "grpo": {"divide_by_std": False},
    },
    # Zheng et al. 2025, with the ranges of section 5.1.
    "gspo": {
        "loss": {
            "ratio_level": "sequence",
            "loss_type": "sequence_level",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "importance_mode": "sequence_truncate",
        }
    },
    # MiniMax 2025: no lower bound. The upper one, 5, is that of Khatri et al. 2025.
    "cispo": {"loss": {"clipping": "cispo", "clip_low": None, "clip_high": 4.0}},
    # Ahmadian et al. 2024: REINFORCE on whole completions.
    "rloo": {
        "loss": {
            "clipping": "cispo",
            "clip_low": 0.0,
            "clip_high": 0.0,
            "loss_type": "sequence_level",
            "length_divisor": 1,
            "kl_coef": 0.05,
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
        "grpo": {"leave_one_out": True, "divide_by_std": False},
    },
    # Hu 2025.
    "reinforce_pp": {
        "loss": {"kl_coef": 0.01, "kl_in": "reward_to_go", "kl_estimator": "k1"},
        "grpo": {"group_baseline": False, "divide_by_std": False, "whiten": "tokens"},
    },
    "reinforce_pp_baseline": {
        "loss": {"kl_coef": 0.001, "kl_estimator": "k2"},
        "grpo": {"divide_by_std": False, "whiten": "tokens"},
    },
    # Liu et al. 2026.
    "gdpo": {
        "loss": {"loss_type": "sequence_level", "kl_coef": 0.001},
        "grpo": {"normalize_each_reward": True, "whiten": "samples"},
    },
    # Ling team 2025: GRPO, and weights beyond [0.5, 5] are masked.
    "icepop": {
        "loss": {
            "loss_type": "sequence_level",
            "importance_mode": "token_mask",
            "importance_floor": 0.5,
            "importance_cap": 5.0,
        }
    },
}
PRESETS: Mapping[str, Settings] = {
    name: merge_sections(_PLAIN, changes) for name, changes in _CHANGES.items()
}
"""The keys of `loss` and `grpo` that `loss.preset` stands for."""

_ASYNC_REASONS = {
    "refit.verify": "completions of earlier weights have other log-probabilities",
    "refit.staging": "engines would wait for all that they sample before each refit",
}


class GrpoSection(PolicyGradientSection):
    """Group relative policy optimization."""

    samples_per_prompt: int = Field(default=8, ge=2, le=MOST)
    """Completions per prompt: the size of a group."""
    group_baseline: bool = True
    """Compare rewards with the mean of their group. false: REINFORCE++, which has `whiten`."""
    leave_one_out: bool = False
    """Exclude a completion's own reward from its baseline (RLOO)."""
    divide_by_std: bool = True
    """Divide advantages by the standard deviation of the group."""
    normalize_each_reward: bool = False
    """Compare each of several reward functions on its own, and then add up (GDPO)."""
    whiten: Literal["tokens", "samples"] | None = None
    """Subtract from advantages their mean over all target tokens, or completions, of a step, and
    divide by the standard deviation. null: neither."""
    dynamic_sampling: int = Field(default=0, ge=0, le=1000)
    """Most rounds after the first in which a step replaces prompts whose completions all have one
    reward (DAPO). 0: none are replaced."""
    overlong_share: float = Field(default=0.0, ge=0, le=1)
    """Share of policy.generation.max_new_tokens, at its end, over which a penalty grows from 0 to
    overlong_penalty (DAPO). 0: there is none."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """Taken from the reward of a completion of max_new_tokens, if overlong_share is set."""


class LossSection(PolicyLossSection):
    """GRPO's loss. The keys but two are the arguments of `rl_policy.losses.ClippedPGLoss`."""

    preset: PresetName | None = None
    """A combination of keys of `loss` and `grpo` as a paper has it; keys given beside it take
    precedence. null: the defaults of the keys."""


def expand_preset(given: Settings) -> Settings:
    """Return nested settings with those that `loss.preset` stands for; others stay as they are."""
    section = given.get("loss")
    name: Any = section.get("preset") if isinstance(section, Mapping) else None
    if not isinstance(name, str) or name not in PRESETS:
        return given  # an unknown one is refused with the keys of the section
    return merge_sections(PRESETS[name], given)


def check_grpo(config: RunConfig) -> None:
    """Raise `ValueError` if keys contradict each other."""
    check_rollouts(config)
    _check_overlong(config)
    generation = config.policy["generation"]
    if generation["temperature"] == 0:
        raise ValueError(
            "policy.generation.temperature=0 makes all completions of a prompt equal: GRPO "
            "compares them"
        )
    _check_async(config)
    _check_objective(
        config.section(GrpoSection),
        config.section(LossSection),
        num_rewards=len(config.section(RewardSection).functions),
    )


def _check_overlong(config: RunConfig) -> None:
    function = config.section(EnvironmentSection).function
    share = config.section(GrpoSection).overlong_share
    if function is not None and share:
        raise ValueError(
            f"environment.function={str(function)!r} contradicts grpo.overlong_share={share}: it "
            "is of policy.generation.max_new_tokens, which a turn has and not an episode; set it "
            "to 0"
        )


def plan_rollouts(config: RunConfig) -> AsyncPlan | None:
    """Return the numbers of asynchronous rollouts; None if each step samples anew."""
    grpo, section = config.section(GrpoSection), config.section(AsyncSection)
    if not section.max_staleness:
        return None
    num_samples = grpo.prompts_per_step * grpo.samples_per_prompt
    updates = num_samples // config.policy["train_global_batch_size"]
    return AsyncPlan(
        num_groups=grpo.prompts_per_step,
        group_size=grpo.samples_per_prompt,
        num_steps=grpo.steps,
        versions_per_step=updates * grpo.epochs_per_step,
        max_staleness=section.max_staleness,
        refit_every=section.refit_every,
    )


def _check_async(config: RunConfig) -> None:
    plan = plan_rollouts(config)
    if plan is None:
        return
    key = f"async.max_staleness={plan.max_staleness}"
    if not config.has_engines:
        raise ValueError(
            f"{key} needs engines that sample while the policy trains: set "
            "policy.generation.backend=vllm and policy.generation.colocated.enabled=false"
        )
    if config.is_colocated:
        raise ValueError(
            f"{key} contradicts policy.generation.colocated.enabled=True: these engines sleep "
            "while the policy trains; set it to false"
        )
    for name, value, off in (
        ("refit.verify", config.section(RefitSection).verify, "logprobs"),
        ("refit.staging", config.section(RefitSection).staging, "off"),
    ):
        if value == off:
            raise ValueError(f"{key} contradicts {name}={value!r}: {_ASYNC_REASONS[name]}")
    if complete_section(config.policy["generation"])["return_routed_experts"]:
        raise ValueError(
            f"{key} contradicts policy.generation.vllm_cfg.return_routed_experts=True: what is "
            "sampled meanwhile is joined of turns, and has no routes as a whole"
        )
    grpo = config.section(GrpoSection)
    environment = config.section(EnvironmentSection).function
    if isinstance(environment, GivenEnvironment):
        raise ValueError(
            f"{key} contradicts environment.function={str(environment)!r}, which runs in a thread "
            "of this program: name it as FILE.py:NAME or PACKAGE.MODULE:NAME, for processes"
        )
    if grpo.dynamic_sampling:
        raise ValueError(
            f"{key} contradicts grpo.dynamic_sampling={grpo.dynamic_sampling}, which samples in "
            "rounds that wait for one another"
        )
    if config.section(AsyncSection).too_old == "rescore" and grpo.old_logprobs == "sampler":
        raise ValueError(
            "async.too_old='rescore' contradicts grpo.old_logprobs='sampler': what is too old is "
            "trained on with the trainer's"
        )
    plan.check()


def _check_objective(grpo: GrpoSection, loss: LossSection, *, num_rewards: int) -> None:
    if not grpo.group_baseline:
        for key in ("leave_one_out", "divide_by_std", "normalize_each_reward"):
            if getattr(grpo, key):
                raise ValueError(
                    f"grpo.{key}=True contradicts grpo.group_baseline=False: it compares the "
                    f"completions of a group; set grpo.{key}=false"
                )
    if grpo.normalize_each_reward and num_rewards < 2:
        raise ValueError(
            f"grpo.normalize_each_reward=True needs several functions in reward.function, which "
            f"names {num_rewards}: add one, or set grpo.normalize_each_reward=false"
        )
    if grpo.normalize_each_reward and loss.kl_in == "reward" and loss.kl_coef:
        raise ValueError(
            "grpo.normalize_each_reward=True contradicts loss.kl_in='reward', which is added to "
            "the sum of the rewards: set loss.kl_in=reward_to_go, or loss"
        )
    if grpo.whiten == "samples" and loss.kl_in == "reward_to_go" and loss.kl_coef:
        raise ValueError(
            "grpo.whiten='samples' contradicts loss.kl_in='reward_to_go', by which each token has "
            "an advantage of its own: set grpo.whiten=tokens"
        )
