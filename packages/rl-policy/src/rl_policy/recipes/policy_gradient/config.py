"""What the recipes of the policy gradient share in their configuration: keys, and their checks.

The section of such a recipe bears its name and is a `PolicyGradientSection`; its section `loss` is
a `PolicyLossSection`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator
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
from rl_policy.generation.vllm.config import complete_section
from rl_policy.losses import ClippedPGLoss, Clipping, ImportanceMode, KLEstimator, RatioLevel
from rl_policy.recipes.sft import SFT_PATH, sft_policy
from rl_policy.run.inputs import check_language_model, check_sampling

KLPlace: TypeAlias = Literal["loss", "reward", "reward_to_go"]
"""Where the KL penalty is."""


class PolicyGradientSection(Section):
    """Steps of sampling and of training on what was sampled."""

    steps: int = Field(default=100, ge=1, le=MOST)
    """Steps, each on newly sampled completions."""
    prompts_per_step: int = Field(default=16, ge=1, le=MOST)
    """Prompts per step."""
    samples_per_prompt: int = Field(default=1, ge=1, le=MOST)
    """Completions per prompt."""
    epochs_per_step: int = Field(default=1, ge=1, le=MOST)
    """Epochs over the samples of a step, each of samples / policy.train_global_batch_size
    optimizer steps."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """The source of the log-probabilities before the update. `sampler` saves a forward pass; it
    needs an untruncated sampler and no correction: no top_k, no top_p, no importance_cap."""
    eval_every: int = Field(default=5, ge=1, le=MOST)
    """Steps between evaluations of held-out accuracy."""
    eval_at_start: bool = True
    """Evaluate before the first step too, as step 0."""
    warm_up: bool | None = None
    """Start with supervised fine-tuning. null: only for the built-in model, which is untrained, and
    without an environment."""


class PolicyLossSection(Section):
    """The loss. The keys but `kl_in` are arguments of `rl_policy.losses.ClippedPGLoss`."""

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
    """Coefficient of the KL penalty against the model that the warm-up leaves. 0 saves the
    reference model and its forward pass; `kl` is then null in the metrics."""
    kl_in: KLPlace = "loss"
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
    def _check_combination(self) -> Self:
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


def build_loss(section: PolicyLossSection, *, max_new_tokens: int) -> ClippedPGLoss:
    """Return the loss configured by the section `loss`.

    Args:
        section: The section.
        max_new_tokens: The most tokens of a completion.
    """
    arguments = section.model_dump(include={each.name for each in fields(ClippedPGLoss)})
    if section.length_divisor == "max_new_tokens":
        arguments["length_divisor"] = max_new_tokens
    if section.kl_in != "loss":
        arguments["kl_coef"] = 0.0
    return ClippedPGLoss(**arguments)


def has_warm_up(config: RunConfig) -> bool:
    """Return whether the run starts with supervised fine-tuning."""
    configured = config.section(PolicyGradientSection).warm_up
    has_environment = config.section(EnvironmentSection).function is not None
    default = config.has_builtin_model and not has_environment
    return default if configured is None else configured


def warm_up_policies(config: RunConfig) -> dict[str, Settings]:
    """Return the section `policy` of the supervised fine-tuning by its path, if there is one."""
    return {SFT_PATH: sft_policy(config)} if has_warm_up(config) else {}


def check_rollouts(config: RunConfig) -> None:
    """Raise `ValueError` if what is sampled, rewarded and sent to engines contradicts itself."""
    check_sampling(config)
    check_language_model(sft_policy(config), path=SFT_PATH)
    _check_adapters(config)
    check_batch_size(config, config.policy)
    _check_environment(config)
    generation = config.policy["generation"]
    if config.section(PolicyGradientSection).old_logprobs == "sampler":
        _check_sampler_logprobs(config, generation)
        _check_routes(config, generation)
    check_sampled_routes(config, generation)
    check_refit(config.section(RefitSection), generation)
    check_delta(config)
    check_adapters_alone(config)
    check_slices(config)


def _check_adapters(config: RunConfig) -> None:
    """Check that adapters are not applied twice, in the warm-up and after it."""
    path = _adapter_path(config.policy)
    if path is None or not has_warm_up(config):
        return
    if path == _adapter_path(sft_policy(config)):
        raise ValueError(
            f"policy.dtensor_cfg.lora.adapter_path={path!r} would be applied twice, as the model "
            f"has these adapters after the warm-up: set {config.recipe}.warm_up=false, or set only "
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


def check_batch_size(config: RunConfig, policy: Settings, *, path: str = "policy") -> None:
    """Raise `ValueError` if the samples of a step are no whole number of optimizer steps.

    Args:
        config: With a `PolicyGradientSection`.
        policy: The section of what is trained.
        path: Its key.
    """
    section, gbs = config.section(PolicyGradientSection), policy["train_global_batch_size"]
    num_samples = section.prompts_per_step * section.samples_per_prompt
    if num_samples % gbs:
        raise ValueError(
            f"{path}.train_global_batch_size={gbs} does not divide the {num_samples} "
            f"samples of a step ({config.recipe}.prompts_per_step={section.prompts_per_step} * "
            f"{config.recipe}.samples_per_prompt={section.samples_per_prompt})"
        )


def _check_sampler_logprobs(config: RunConfig, generation: Settings) -> None:
    other = {
        "loss.importance_cap": config.section(PolicyLossSection).importance_cap,
        "policy.generation.top_k": generation.get("top_k"),
        "policy.generation.top_p": None if generation["top_p"] == 1 else generation["top_p"],
    }
    for key, value in other.items():
        if value is not None:
            raise ValueError(
                f"{config.recipe}.old_logprobs='sampler' contradicts {key}={value}: the sampler's "
                "log-probabilities are then not the trainer's"
            )


def _check_routes(config: RunConfig, generation: Settings) -> None:
    section = config.policy.get("megatron_cfg", {})
    if section.get("moe_router_replay") and generation["backend"] != "vllm":
        raise ValueError(
            f"{config.recipe}.old_logprobs='sampler' contradicts "
            "policy.megatron_cfg.moe_router_replay=True: "
            "the pass that records routes is the trainer's"
        )


def check_sampled_routes(config: RunConfig, generation: Settings) -> None:
    """Raise `ValueError` if engines return routes that are not read, or not all of them."""
    if generation["backend"] != "vllm" or not complete_section(generation)["return_routed_experts"]:
        return
    key = "policy.generation.vllm_cfg.return_routed_experts=True"
    section = config.policy.get("megatron_cfg") or {}
    if not (section.get("enabled") and section.get("moe_router_replay")):
        raise ValueError(
            f"{key} without policy.megatron_cfg.moe_router_replay=True: nothing reads the routes"
        )
    if config.section(EnvironmentSection).function is not None:
        raise ValueError(
            f"{key} contradicts environment.function: the turns of an episode are sampled one by "
            "one, and have no routes as a whole"
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


def check_slices(config: RunConfig) -> None:
    """Raise `ValueError` if `refit.slices` is set beside what only full tensors can be sent by."""
    refit, generation = config.section(RefitSection), config.policy["generation"]
    if not refit.slices or not config.has_engines:
        return
    contradictions = [
        (
            generation["backend"] != "vllm",
            f"policy.generation.backend={generation['backend']!r}: of the engines, 'vllm' says "
            "which slices it loads; leave refit.slices out",
        ),
        (
            enabled_backend(config.policy) == "dtensor"
            and config.policy["dtensor_cfg"]["lora"]["enabled"],
            "policy.dtensor_cfg.lora.enabled=True: adapters are merged into full tensors; leave "
            "refit.slices out",
        ),
        *(
            (
                getattr(refit, key) != RefitSection.model_fields[key].default,
                f"refit.{key}={getattr(refit, key)!r}: slices have their own way and their own "
                "digest; leave one of them out",
            )
            for key in ("transport", "bucket_mib", "adapters")
        ),
        (
            refit.verify == "none",
            "refit.verify='none': slices are always checked; use 'digest'",
        ),
    ]
    for is_met, reason in contradictions:
        if is_met:
            raise ValueError(f"refit.slices=True contradicts {reason}")


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
