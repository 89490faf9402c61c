"""The configuration of a run: its sections, and every default in one place.

`DEFAULT_POLICY` completes the section `policy`, whose keys `rl_interfaces.PolicyConfig` documents.
`BUILTIN_RUN` goes over all defaults in a run that builds its own model, where `policy.model_name`
is not set or `builtin`: it holds what only a model of a hundred thousand parameters can bear.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rl_policy.backends import WORKERS_OWN
from rl_policy.config_policy import (
    BUILTIN_MODEL,
    merge_policy,
    merge_sections,
    resolve_policy,
)

Recipe = Literal["grpo", "sft"]

DEFAULT_POLICY: dict[str, Any] = {
    # Runs everywhere. bfloat16 is the better choice on a recent GPU.
    "precision": "float32",
    "train_global_batch_size": 32,
    "train_micro_batch_size": 4,
    "logprob_batch_size": 4,
    "generation_batch_size": 32,
    "max_total_sequence_length": 512,
    "max_grad_norm": 1.0,
    # A rate that fine-tuning of a pretrained model survives.
    "optimizer": {
        "name": "torch.optim.AdamW",
        "kwargs": {"lr": 1.0e-6, "betas": [0.9, 0.95], "weight_decay": 0.0},
    },
    "generation": {"backend": "hf", "max_new_tokens": 128, "temperature": 1.0},
    "dtensor_cfg": {"enabled": True},
}

BUILTIN_RUN: dict[str, Any] = {
    "policy": {
        "train_global_batch_size": 256,
        "train_micro_batch_size": 128,
        "logprob_batch_size": 256,
        "generation_batch_size": 256,
        "max_total_sequence_length": 32,
        "optimizer": {"kwargs": {"lr": 3.0e-4}},
        "generation": {
            "max_new_tokens": 6,
            # Nothing to compile or to capture for a model this small.
            "vllm_cfg": {"enforce_eager": True, "kv_cache_memory_bytes": 64 * 2**20},
        },
    },
    "sft": {
        "steps": 1000,
        "eval_every": 25,
        "stop_pass_rate": 0.95,
        "policy": {"optimizer": {"kwargs": {"lr": 2.0e-3}}},
    },
    "grpo": {"steps": 60, "prompts_per_step": 64, "samples_per_prompt": 8},
}


class Section(BaseModel):
    """A section: unknown keys and values of another type are refused, values do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class ClusterSection(Section):
    """The devices. The keys are the arguments of `rl_policy.RayVirtualCluster`."""

    bundle_ct_per_node_list: list[int] = Field(default=[2], min_length=1)
    """Workers on each node."""
    use_gpus: bool | None = None
    """Whether a worker gets a GPU. null: where there are any."""
    num_gpus_per_node: int = Field(default=8, ge=1)
    """Most GPUs that a node has."""
    placement_group_strategy: str = "SPREAD"
    """Ray's strategy for the workers of a node."""


class TinyModelSection(Section):
    """The model that is built where `policy.model_name` is not set: a Qwen2."""

    hidden_size: int = Field(default=64, ge=32)
    """Width; a multiple of head_size."""
    intermediate_size: int = Field(default=256, ge=1)
    """Width of the MLPs."""
    num_layers: int = Field(default=2, ge=1)
    """Layers."""
    head_size: int = Field(default=32, ge=32)
    """Width of an attention head. Inference engines refuse less than 32."""
    initializer_range: float = Field(default=0.1, gt=0)
    """Standard deviation of the weights. At this width, the 0.02 of large models learns slowly."""


class DataSection(Section):
    """The problems: the user's own, or doublings that are made here."""

    path: str | None = None
    """JSON lines with the texts `prompt` and `answer`. null: doublings."""
    heldout_path: str | None = None
    """The same, for problems that are only evaluated. null: taken out of the others."""
    num_heldout: int = Field(default=256, ge=1)
    """Problems that accuracy is measured on, and that are never trained on."""
    num_validation: int = Field(default=256, ge=1)
    """Problems that say when the supervised part is done. Taken out only where that asks for it."""
    max_number: int = Field(default=9999, ge=9)
    """Largest number that is doubled in the problems made here."""
    careless_share: float = Field(default=0.6, ge=0, le=1)
    """Share of the demonstrations made here that forget to carry. GRPO has to find out."""
    use_chat_template: bool = False
    """Put each prompt as a user's message through the tokenizer's chat template."""


class RewardSection(Section):
    """The reward: 1 where the text of the answer is exactly right, otherwise 0."""

    answer_pattern: str | None = None
    """Regular expression whose last match in the completion is its answer: the first group, or
    all of it. null: the completion is the answer, without the white space around it."""


class LossSection(Section):
    """GRPO's loss. The keys are the arguments of `rl_policy.losses.ClippedPGLoss`."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """How far the probability ratio may fall below 1."""
    clip_high: float = Field(default=0.28, ge=0)
    """How far it may rise above 1."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Largest cost per unit of negative advantage. null: no bound."""
    kl_coef: float = Field(default=0.001, ge=0)
    """Weight of the KL penalty against the model that GRPO started from. 0 saves the reference
    model and its pass; `kl` is then null in the metrics."""
    importance_cap: float | None = Field(default=2.0, ge=1)
    """Largest importance weight between sampler and trainer. null: no correction."""
    loss_type: Literal["token_level", "sequence_level"] = "token_level"
    """What counts the same: every token, or every sequence."""


class SftSection(Section):
    """Supervised fine-tuning on prompt and answer, alone or as the warm-up of GRPO."""

    steps: int = Field(default=200, ge=1)
    """Most optimizer steps."""
    eval_every: int = Field(default=20, ge=1)
    """Steps between two measurements."""
    stop_pass_rate: float | None = Field(default=None, gt=0, le=1)
    """Stop when this share of the validation problems is solved by at least one of
    `pass_samples` samples: GRPO learns from those alone. null: take all steps."""
    pass_samples: int = Field(default=8, ge=1)
    """Samples per validation problem."""
    policy: dict[str, Any] = Field(default_factory=dict)
    """Keys of `policy` that are different in the supervised part."""


class GrpoSection(Section):
    """Group relative policy optimization."""

    steps: int = Field(default=100, ge=1)
    """Steps, each with new samples."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Problems per step."""
    samples_per_prompt: int = Field(default=8, ge=2)
    """Completions per problem, the group that a completion is compared with."""
    epochs_per_step: int = Field(default=1, ge=1)
    """Passes over the samples of a step, each of samples / policy.train_global_batch_size
    optimizer steps."""
    leave_one_out: bool = False
    """Leave a completion's own reward out of its baseline (RLOO)."""
    divide_by_std: bool = True
    """Divide advantages by the standard deviation of the group."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Where the log-probabilities before the update come from. `sampler` saves a pass; it needs
    a sampler that gives the trainer's numbers: no top_k, no top_p, no importance_cap."""
    eval_every: int = Field(default=5, ge=1)
    """Steps between two measurements of held-out accuracy."""
    warm_up: bool | None = None
    """Start with supervised fine-tuning. null: where the model is built here, and knows nothing."""


class RefitSection(Section):
    """Handing weights to inference engines, where policy.generation.backend names some."""

    transport: str | None = None
    """`shm`, `cuda_ipc`, `collective`, `golden`, or a third party's. null: the fastest that reaches
    the engines."""
    bucket_mib: int | None = Field(default=None, ge=1)
    """Size of each of two buffers, in MiB. null: by the model's size."""
    verify: Literal["none", "digest", "weights", "logprobs"] = "digest"
    """`digest` checks every buffer before it is loaded; `weights` the live parameters too, of
    engines that can yield them by name, which vLLM cannot; `logprobs`, besides the digest, ends the
    run where mismatch_max_abs is over max_mismatch."""
    max_mismatch: float | None = Field(default=None, gt=0)
    """Most nats between an engine's log-probability of a sampled token and the trainer's. Float32
    stays under 1e-4; bfloat16 is off by some hundredths."""


class CheckpointSection(Section):
    """Checkpoints of a run, from which `--resume` continues it."""

    every: int = Field(default=25, ge=1)
    """Steps between two checkpoints."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept; the best by accuracy is kept besides."""


class RunConfig(Section):
    """A run of one recipe."""

    recipe: Recipe
    """`grpo` or `sft`; the command's name."""
    seed: int = Field(default=0, ge=0)
    """Of data, order, the model built here and, where policy.seed is not set, the workers."""
    policy: dict[str, Any]
    """The policy: the keys of `rl_interfaces.PolicyConfig`."""
    cluster: ClusterSection = ClusterSection()
    tiny_model: TinyModelSection = TinyModelSection()
    data: DataSection = DataSection()
    reward: RewardSection = RewardSection()
    sft: SftSection = SftSection()
    grpo: GrpoSection = GrpoSection()
    loss: LossSection = LossSection()
    refit: RefitSection = RefitSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @field_validator("policy")
    @classmethod
    def _complete_policy(cls, policy: dict[str, Any]) -> dict[str, Any]:
        return resolve_policy(policy)

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        self.sft_policy()
        _check_adapters(self)
        _check_tokenizer(self)
        _check_sizes(self)
        _check_sampling(self)
        return self

    @property
    def has_builtin_model(self) -> bool:
        """Whether the model is built by the run."""
        return self.policy["model_name"] == BUILTIN_MODEL

    @property
    def has_warm_up(self) -> bool:
        """Whether GRPO starts with supervised fine-tuning."""
        return self.has_builtin_model if self.grpo.warm_up is None else self.grpo.warm_up

    @property
    def is_supervised(self) -> bool:
        """Whether the run has a supervised part, alone or before GRPO."""
        return self.recipe == "sft" or self.has_warm_up

    @property
    def num_samples(self) -> int:
        """Completions per GRPO step."""
        return self.grpo.prompts_per_step * self.grpo.samples_per_prompt

    @property
    def has_engines(self) -> bool:
        """Whether GRPO samples with inference engines."""
        return self.recipe == "grpo" and self.policy["generation"]["backend"] != WORKERS_OWN

    @property
    def is_colocated(self) -> bool:
        """Whether engines, where there are any, share the policy's devices."""
        return self.policy["generation"].get("colocated", {}).get("enabled", True)

    @property
    def engine_bundles(self) -> list[int]:
        """Devices on each node for engines that do not share the policy's; one by default."""
        resources = self.policy["generation"].get("colocated", {}).get("resources", {})
        return [resources.get("gpus_per_node", 1)] * resources.get("num_nodes", 1)

    def sft_policy(self) -> dict[str, Any]:
        """Return the complete section `policy` of the supervised part.

        Its few samples come from the training workers, whatever samples for GRPO.
        """
        own = merge_sections({"generation": {"backend": WORKERS_OWN}}, self.sft.policy)
        merged = merge_policy(self.policy, own)
        merged.get("generation", {}).pop("colocated", None)
        return resolve_policy(merged, path="sft.policy")


def _check_adapters(config: RunConfig) -> None:
    """Check that adapters that are given are not applied to a model that has them already."""
    path = _adapter_path(config.policy)
    if path is None or config.recipe != "grpo" or not config.has_warm_up:
        return
    if path == _adapter_path(config.sft_policy()):
        raise ValueError(
            f"policy.dtensor_cfg.lora.adapter_path={path!r} would be applied twice, as the model "
            "that comes out of the warm-up has these adapters: set grpo.warm_up=false, or give it "
            "as sft.policy.dtensor_cfg.lora.adapter_path alone"
        )


def _adapter_path(policy: Mapping[str, Any]) -> str | None:
    lora = policy["dtensor_cfg"]["lora"]
    return lora.get("adapter_path") if lora["enabled"] else None


def _check_tokenizer(config: RunConfig) -> None:
    name = config.policy["tokenizer"]["name"]
    if config.has_builtin_model and name != BUILTIN_MODEL:
        raise ValueError(
            f"policy.tokenizer.name={name!r} contradicts policy.model_name={BUILTIN_MODEL!r}: "
            "the model that is built here has its own tokenizer"
        )


def _check_sizes(config: RunConfig) -> None:
    grpo, gbs = config.grpo, config.policy["train_global_batch_size"]
    if config.recipe == "grpo" and config.num_samples % gbs:
        raise ValueError(
            f"policy.train_global_batch_size={gbs} does not divide the {config.num_samples} "
            f"samples of a step (grpo.prompts_per_step={grpo.prompts_per_step} * "
            f"grpo.samples_per_prompt={grpo.samples_per_prompt})"
        )
    model = config.tiny_model
    if model.hidden_size % model.head_size:
        raise ValueError(
            f"tiny_model.head_size={model.head_size} does not divide "
            f"tiny_model.hidden_size={model.hidden_size}"
        )
    if min(config.cluster.bundle_ct_per_node_list) < 1:
        raise ValueError(
            f"cluster.bundle_ct_per_node_list={config.cluster.bundle_ct_per_node_list} "
            "must hold positive numbers"
        )


def _check_sampling(config: RunConfig) -> None:
    """Check what the recipes ask of the sampler, which measures accuracy too."""
    generation = config.policy.get("generation")
    if generation is None:
        raise ValueError("policy.generation is not set: the recipes sample completions")
    if "max_total_sequence_length" not in config.policy:
        raise ValueError("policy.max_total_sequence_length is not set: most tokens of a sequence")
    longest, new = config.policy["max_total_sequence_length"], generation["max_new_tokens"]
    if new >= longest:
        raise ValueError(
            f"policy.generation.max_new_tokens={new} leaves no room for a prompt in "
            f"policy.max_total_sequence_length={longest}"
        )
    if config.recipe == "grpo" and generation["temperature"] == 0:
        raise ValueError(
            "policy.generation.temperature=0 makes the completions of a prompt all alike: "
            "GRPO compares them"
        )
    if config.grpo.old_logprobs == "sampler":
        _check_sampler_logprobs(config, generation)
    if config.refit.verify == "weights" and generation["backend"] == "vllm":
        raise ValueError(
            "refit.verify='weights' contradicts policy.generation.backend='vllm': vLLM fuses its "
            "weights and cannot yield them by name; use 'digest', or 'logprobs' with a max_mismatch"
        )
    if (config.refit.verify == "logprobs") != (config.refit.max_mismatch is not None):
        raise ValueError(
            f"refit.verify={config.refit.verify!r} and refit.max_mismatch="
            f"{config.refit.max_mismatch}: give both or neither, verify='logprobs' and a limit"
        )


def _check_sampler_logprobs(config: RunConfig, generation: dict[str, Any]) -> None:
    other = {
        "loss.importance_cap": config.loss.importance_cap,
        "policy.generation.top_k": generation.get("top_k"),
        "policy.generation.top_p": None if generation["top_p"] == 1 else generation["top_p"],
    }
    for key, value in other.items():
        if value is not None:
            raise ValueError(
                f"grpo.old_logprobs='sampler' contradicts {key}={value}: the sampler's "
                "log-probabilities are then not the trainer's"
            )
