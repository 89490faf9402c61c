"""What a policy gradient optimizes: the section `loss`, presets, and the advantages of a step.

A preset names a combination of keys of the sections `loss` and `grpo` as a paper has it. Keys that
are given beside it take precedence, and `--show-config` shows the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from rl_interfaces.config.resolve import merge_sections
from rl_interfaces.config.schema import MOST

from rl_policy.config import RewardSection, RunConfig, Section, Settings
from rl_policy.data.rewards import Rewards
from rl_policy.losses import (
    ClippedPGLoss,
    Clipping,
    ImportanceMode,
    KLEstimator,
    RatioLevel,
    estimate_kl,
    group_relative_advantages,
    overlong_penalties,
    per_reward_advantages,
    reward_to_go_penalty,
    whiten,
)

if TYPE_CHECKING:
    from rl_policy.recipes.grpo import GrpoSection

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


class LossSection(Section):
    """GRPO's loss. The keys but two are the arguments of `rl_policy.losses.ClippedPGLoss`."""

    preset: PresetName | None = None
    """A combination of keys of `loss` and `grpo` as a paper has it; keys given beside it take
    precedence. null: the defaults of the keys."""
    clip_low: float | None = Field(default=0.2, ge=0, lt=1)
    """Lower clipping range of the probability ratio, below 1. null: no bound."""
    clip_high: float | None = Field(default=0.28, ge=0)
    """Upper clipping range of the probability ratio, above 1. null: no bound."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the cost per unit of negative advantage. null: no bound."""
    ratio_level: RatioLevel = "token"
    """What the ratio is of: a token, or a sequence, as in GSPO."""
    clipping: Clipping = "ppo"
    """`ppo`: a clipped token has no gradient. `cispo`: only its weight is clipped."""
    loss_type: Literal["token_level", "sequence_level"] = "token_level"
    """The unit of the mean: tokens or sequences."""
    length_divisor: float | Literal["max_new_tokens"] | None = None
    """With sequence_level: what the sum over each sequence is divided by, instead of its length.
    `max_new_tokens`: policy.generation.max_new_tokens, as in Dr. GRPO. null: its length."""
    kl_coef: float = Field(default=0.001, ge=0)
    """Coefficient of the KL penalty against the initial model of GRPO. 0 saves the reference model
    and its forward pass; `kl` is then null in the metrics."""
    kl_in: Literal["loss", "reward", "reward_to_go"] = "loss"
    """Where the penalty is: in the loss; summed over a completion, in its reward before the
    baseline; or in the advantage of each token, summed over it and those after it."""
    kl_estimator: KLEstimator = "k3"
    """The estimator of the KL of a token (Schulman 2020)."""
    kl_log_ratio_clamp: float | None = Field(default=None, gt=0)
    """Most nats of the log-ratio in the estimate, of either sign. null: any."""
    kl_clamp: float | None = Field(default=None, gt=0)
    """Most nats of the estimate of a token, of either sign. null: any."""
    kl_unbiased: bool = False
    """Multiply the penalty in the loss by the ratio of the token: its gradient is then that of the
    KL."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    importance_cap: float | None = Field(default=2.0, ge=1)
    """Upper bound of the importance weights between sampler and trainer. null: no correction."""
    importance_floor: float | None = Field(default=None, ge=0, le=1)
    """Lower bound of the importance weights. null: none."""
    importance_mode: ImportanceMode = "token_truncate"
    """What is bounded, the weight of a token, of a sequence, or its geometric mean, and whether
    what is beyond a bound is truncated or masked."""

    @field_validator("length_divisor", mode="plain")
    @classmethod
    def _length_or_name(cls, value: Any) -> Any:
        if value is None or value == "max_new_tokens":
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= MOST:
            raise ValueError(
                f"loss.length_divisor={value!r} must be a number of tokens above 0, "
                "'max_new_tokens', or null"
            )
        return float(value)

    @model_validator(mode="after")
    def _check_combination(self) -> LossSection:
        try:
            build_loss(self, max_new_tokens=1)
        except ValueError as error:
            raise ValueError(f"loss.{error}") from None
        if self.kl_unbiased and self.kl_in != "loss":
            raise ValueError(
                f"loss.kl_unbiased=True contradicts loss.kl_in={self.kl_in!r}: in the reward, the "
                "penalty has no gradient of its own; set loss.kl_unbiased=false"
            )
        return self


def build_loss(section: LossSection, *, max_new_tokens: int) -> ClippedPGLoss:
    """Return the loss configured by the section `loss`.

    Args:
        section: The section.
        max_new_tokens: The most tokens of a completion.
    """
    arguments = section.model_dump(exclude={"preset", "kl_in"})
    if section.length_divisor == "max_new_tokens":
        arguments["length_divisor"] = max_new_tokens
    if section.kl_in != "loss":
        arguments["kl_coef"] = 0.0
    return ClippedPGLoss(**arguments)


def expand_preset(given: Settings) -> Settings:
    """Return nested settings with those that `loss.preset` stands for; others stay as they are."""
    section = given.get("loss")
    name: Any = section.get("preset") if isinstance(section, Mapping) else None
    if not isinstance(name, str) or name not in PRESETS:
        return given  # an unknown one is refused with the keys of the section
    return merge_sections(PRESETS[name], given)


def check_objective(grpo: GrpoSection, loss: LossSection, *, num_rewards: int) -> None:
    """Raise `ValueError` if keys of the sections contradict each other.

    Args:
        grpo: The section.
        loss: The section.
        num_rewards: Functions of `reward.function`.
    """
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


def step_advantages(
    batch: Mapping[str, torch.Tensor],
    rewards: Sequence[float],
    *,
    config: RunConfig,
    grpo: GrpoSection,
    loss: LossSection,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the advantage of each token of a step's completions, and what was put into them.

    Args:
        batch: `token_mask` `[batch, seq]` and `sample_mask` `[batch]`; for a KL penalty in the
            reward also `prev_logprobs` and `reference_logprobs` `[batch, seq]`.
        rewards: Of each completion; `Rewards` with their parts, where there are several.
        config: Of the run.
        grpo: Its section.
        loss: Its section.

    Returns:
        `[batch, seq]` float32, the same for all tokens of a completion unless `loss.kl_in` is
        `reward_to_go`; and the mean `overlong_penalty` and `reward_kl`, in nats per completion,
        where there are such.
    """
    values = reward_columns(rewards) if grpo.normalize_each_reward else torch.tensor(rewards)
    mask = batch["token_mask"] * batch["sample_mask"][:, None].long()
    weights = [*(config.section(RewardSection).weights or [1.0] * _num_rewards(config))]
    measured: dict[str, float] = {}
    if grpo.overlong_share:
        max_length = int(config.policy["generation"]["max_new_tokens"])
        penalties = grpo.overlong_penalty * overlong_penalties(
            mask.sum(1), max_length=max_length, buffer=grpo.overlong_share * max_length
        )
        measured["overlong_penalty"] = float(penalties.mean())
        # Beside rewards that are normalised on their own it is one more of them.
        values = _with_column(values, penalties) if values.ndim == 2 else values + penalties
        weights.append(1.0)
    kl = None
    if loss.kl_coef and loss.kl_in != "loss":
        kl = loss.kl_coef * _penalty(batch, mask, loss)
        measured["reward_kl"] = float(kl.sum(1).mean()) / loss.kl_coef
    if kl is not None and loss.kl_in == "reward":
        values = values - kl.sum(1)
    advantages = _baselined(values, grpo=grpo, weights=weights)
    if grpo.whiten == "samples":
        advantages = whiten(advantages, batch["sample_mask"], correction=1)
    tokens = advantages[:, None].expand(mask.shape)
    if kl is not None and loss.kl_in == "reward_to_go":
        tokens = tokens - reward_to_go_penalty(kl, mask)
    if grpo.whiten == "tokens":
        tokens = whiten(tokens, mask)
    return tokens.contiguous(), measured


def reward_columns(rewards: Sequence[float]) -> torch.Tensor:
    """Return rewards with their parts, `[batch, parts]`, or those without any, `[batch, 1]`."""
    parts = [*rewards.parts.values()] if isinstance(rewards, Rewards) else [rewards]
    return torch.tensor(parts).T


def mean_advantages(advantages: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the target tokens of each completion, `[batch]` float32."""
    mask = token_mask.double()
    # In float64 the mean of equal float32 values is exactly theirs.
    return ((advantages.double() * mask).sum(1) / mask.sum(1).clamp(min=1)).float()


def _num_rewards(config: RunConfig) -> int:
    return len(config.section(RewardSection).functions)


def _with_column(values: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return torch.cat([values, column[:, None]], dim=1)


def _penalty(
    batch: Mapping[str, torch.Tensor], mask: torch.Tensor, loss: LossSection
) -> torch.Tensor:
    """Return the KL estimate of each target token before the update, 0 elsewhere."""
    log_ratio = batch["reference_logprobs"] - batch["prev_logprobs"]
    return estimate_kl(
        torch.where(mask > 0, log_ratio, 0.0),
        estimator=loss.kl_estimator,
        log_ratio_clamp=loss.kl_log_ratio_clamp,
        clamp=loss.kl_clamp,
    )


def _baselined(
    values: torch.Tensor, *, grpo: GrpoSection, weights: Sequence[float]
) -> torch.Tensor:
    """Return rewards, or the parts of each, less the baseline; `[batch]`."""
    if not grpo.group_baseline:
        return values.float()
    group: dict[str, Any] = {
        "group_size": grpo.samples_per_prompt,
        "leave_one_out": grpo.leave_one_out,
        "divide_by_std": grpo.divide_by_std,
    }
    if values.ndim == 2:
        return per_reward_advantages(values, weights=weights, **group)
    return group_relative_advantages(values, **group)
