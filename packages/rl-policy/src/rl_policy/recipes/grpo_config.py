"""The configuration of GRPO: its sections, presets, and the checks that join keys of several.

A preset names a combination of keys of the sections `loss` and `grpo` as a paper has it. Keys that
are given beside it take precedence, and `--show-config` shows the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from rl_interfaces.config.resolve import merge_sections
from rl_interfaces.config.schema import MOST

from rl_policy.backends import enabled_backend
from rl_policy.config import (
    EnvironmentSection,
    RefitSection,
    RewardSection,
    RunConfig,
    Section,
    Settings,
)
from rl_policy.environments.pool import GivenEnvironment
from rl_policy.generation.vllm.config import complete_section
from rl_policy.losses import ClippedPGLoss, Clipping, ImportanceMode, KLEstimator, RatioLevel
from rl_policy.recipes.async_rollouts import AsyncPlan, AsyncSection
from rl_policy.recipes.sft import sft_policy
from rl_policy.run.inputs import check_language_model, check_sampling

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


class GrpoSection(Section):
    """Group relative policy optimization."""

    steps: int = Field(default=100, ge=1, le=MOST)
    """Steps, each on newly sampled completions."""
    prompts_per_step: int = Field(default=16, ge=1, le=MOST)
    """Prompts per step."""
    samples_per_prompt: int = Field(default=8, ge=2, le=MOST)
    """Completions per prompt: the size of a group."""
    epochs_per_step: int = Field(default=1, ge=1, le=MOST)
    """Epochs over the samples of a step, each of samples / policy.train_global_batch_size
    optimizer steps."""
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
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """The source of the log-probabilities before the update. `sampler` saves a forward pass; it
    needs an untruncated sampler and no correction: no top_k, no top_p, no importance_cap."""
    eval_every: int = Field(default=5, ge=1, le=MOST)
    """Steps between evaluations of held-out accuracy."""
    warm_up: bool | None = None
    """Start with supervised fine-tuning. null: only for the built-in model, which is untrained, and
    without an environment."""


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


def has_warm_up(config: RunConfig) -> bool:
    """Return whether the run starts with supervised fine-tuning."""
    configured = config.section(GrpoSection).warm_up
    has_environment = config.section(EnvironmentSection).function is not None
    default = config.has_builtin_model and not has_environment
    return default if configured is None else configured


def check_grpo(config: RunConfig) -> None:
    """Raise `ValueError` if keys contradict each other."""
    check_sampling(config)
    check_language_model(sft_policy(config), path="sft.policy")
    _check_adapters(config)
    _check_batch_size(config)
    _check_environment(config)
    generation = config.policy["generation"]
    if generation["temperature"] == 0:
        raise ValueError(
            "policy.generation.temperature=0 makes all completions of a prompt equal: GRPO "
            "compares them"
        )
    if config.section(GrpoSection).old_logprobs == "sampler":
        _check_sampler_logprobs(config, generation)
        _check_routes(config, generation)
    check_refit(config.section(RefitSection), generation)
    check_delta(config)
    check_adapters_alone(config)
    _check_async(config)
    _check_objective(
        config.section(GrpoSection),
        config.section(LossSection),
        num_rewards=len(config.section(RewardSection).functions),
    )


def _check_adapters(config: RunConfig) -> None:
    """Check that adapters are not applied twice, in the warm-up and after it."""
    path = _adapter_path(config.policy)
    if path is None or not has_warm_up(config):
        return
    if path == _adapter_path(sft_policy(config)):
        raise ValueError(
            f"policy.dtensor_cfg.lora.adapter_path={path!r} would be applied twice, as the model "
            "has these adapters after the warm-up: set grpo.warm_up=false, or set only "
            "sft.policy.dtensor_cfg.lora.adapter_path"
        )


def _adapter_path(policy: Settings) -> str | None:
    lora = policy["dtensor_cfg"]["lora"]
    return lora.get("adapter_path") if lora["enabled"] else None


def _check_environment(config: RunConfig) -> None:
    function, reward = config.section(EnvironmentSection).function, config.section(RewardSection)
    rewarding = {
        "reward.function": reward.function,
        "reward.weights": reward.weights,
        "reward.answer_pattern": reward.answer_pattern,
    }
    for key, value in rewarding.items():
        if function is not None and value is not None:
            raise ValueError(
                f"environment.function={str(function)!r} contradicts {key}={value}: an environment "
                "gives the rewards itself, leave one of them out"
            )
    share = config.section(GrpoSection).overlong_share
    if function is not None and share:
        raise ValueError(
            f"environment.function={str(function)!r} contradicts grpo.overlong_share={share}: it "
            "is of policy.generation.max_new_tokens, which a turn has and not an episode; set it "
            "to 0"
        )


def _check_batch_size(config: RunConfig) -> None:
    grpo, gbs = config.section(GrpoSection), config.policy["train_global_batch_size"]
    num_samples = grpo.prompts_per_step * grpo.samples_per_prompt
    if num_samples % gbs:
        raise ValueError(
            f"policy.train_global_batch_size={gbs} does not divide the {num_samples} "
            f"samples of a step (grpo.prompts_per_step={grpo.prompts_per_step} * "
            f"grpo.samples_per_prompt={grpo.samples_per_prompt})"
        )


def _check_sampler_logprobs(config: RunConfig, generation: Settings) -> None:
    other = {
        "loss.importance_cap": config.section(LossSection).importance_cap,
        "policy.generation.top_k": generation.get("top_k"),
        "policy.generation.top_p": None if generation["top_p"] == 1 else generation["top_p"],
    }
    for key, value in other.items():
        if value is not None:
            raise ValueError(
                f"grpo.old_logprobs='sampler' contradicts {key}={value}: the sampler's "
                "log-probabilities are then not the trainer's"
            )


def _check_routes(config: RunConfig, generation: Settings) -> None:
    section = config.policy.get("megatron_cfg", {})
    if section.get("moe_router_replay") and generation["backend"] != "vllm":
        raise ValueError(
            "grpo.old_logprobs='sampler' contradicts policy.megatron_cfg.moe_router_replay=True: "
            "the pass that records routes is the trainer's"
        )


def check_refit(refit: RefitSection, generation: Settings) -> None:
    """Raise `ValueError` if engines, or the recipe, cannot verify a refit as it is asked for."""
    if refit.verify == "weights" and generation["backend"] == "vllm":
        raise ValueError(
            "refit.verify='weights' contradicts policy.generation.backend='vllm': vLLM fuses its "
            "weights and cannot yield them by name; use 'digest', or 'logprobs' with max_mismatch"
        )
    if (refit.verify == "logprobs") != (refit.max_mismatch is not None):
        raise ValueError(
            f"refit.verify={refit.verify!r} and refit.max_mismatch="
            f"{refit.max_mismatch}: give both or neither, verify='logprobs' and a limit"
        )


def check_delta(config: RunConfig) -> None:
    """Raise `ValueError` if `refit.delta` is set where only a full refit can be."""
    refit = config.section(RefitSection)
    if not refit.delta or not config.has_engines:
        return
    contradictions = [
        (
            config.is_colocated,
            "policy.generation.colocated.enabled=True: within a machine weights pass through "
            "memory, which finding the changes is no faster than; set it to false, or leave "
            "refit.delta out",
        ),
        (
            config.cluster.use_gpus is True,
            "cluster.use_gpus=True: changes are found in host memory; leave refit.delta out",
        ),
        (
            refit.verify == "none",
            "refit.verify='none': only the digest of the full weights tells that changes met the "
            "weights that they were made for; use 'digest'",
        ),
    ]
    for is_met, reason in contradictions:
        if is_met:
            raise ValueError(f"refit.delta=True contradicts {reason}")


def check_adapters_alone(config: RunConfig) -> None:
    """Raise `ValueError` if `refit.adapters` is "alone" where adapters cannot be sent so."""
    refit, generation = config.section(RefitSection), config.policy["generation"]
    if refit.adapters == "merged" or not config.has_engines:
        return
    lora = config.policy["dtensor_cfg"]["lora"]
    engines = generation.get("vllm_cfg") or {}
    contradictions = [
        (
            # Whether another backend sends adapters is what `check_engines` asks.
            enabled_backend(config.policy) == "dtensor" and not lora["enabled"],
            "policy.dtensor_cfg.lora.enabled=False: there are none; leave refit.adapters out",
        ),
        (
            generation["backend"] != "vllm",
            f"policy.generation.backend={generation['backend']!r}: of the engines, 'vllm' applies "
            "adapters; set refit.adapters to 'merged'",
        ),
        (
            refit.delta,
            "refit.delta=True: adapters change as a whole; leave one of them out",
        ),
        (
            refit.verify == "none",
            "refit.verify='none': only a digest shows that engines hold the weights that the "
            "adapters belong to; use 'digest'",
        ),
        (
            config.is_colocated and complete_section(generation)["sleep_level"] == 2,
            "policy.generation.vllm_cfg.sleep_level=2: engines would need all weights after each "
            "sleep; set it to 1",
        ),
        (
            engines.get("adapter_rank") not in (None, lora["r"]),
            f"policy.generation.vllm_cfg.adapter_rank={engines.get('adapter_rank')}: it is "
            f"policy.dtensor_cfg.lora.r={lora['r']} then; leave it out",
        ),
    ]
    for is_met, reason in contradictions:
        if is_met:
            raise ValueError(f"refit.adapters='alone' contradicts {reason}")


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
