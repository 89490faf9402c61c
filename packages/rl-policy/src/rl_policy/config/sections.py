"""The sections that every run has, and those that several recipes share.

A recipe brings further sections: the configuration of a run is of a type that is put together from
both, see `run_config_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from rl_policy.backends import WORKERS_OWN
from rl_policy.config.policy import BUILTIN_MODEL, Settings, resolve_policy
from rl_policy.recipes import find_recipe

SectionT = TypeVar("SectionT", bound="Section")


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
    """Whether a worker gets a GPU. null: if there are any."""
    num_gpus_per_node: int = Field(default=8, ge=1)
    """Most GPUs that a node has."""
    placement_group_strategy: str = "SPREAD"
    """Ray's strategy for the workers of a node."""


class TinyModelSection(Section):
    """The model that is built if `policy.model_name` is not set: a Qwen2."""

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
    """What is trained on: the user's own problems or preference pairs, or doublings made here."""

    path: str | None = None
    """JSON lines with the texts `prompt` and `answer`; for preferences `prompt`, `chosen` and
    `rejected`. null: doublings."""
    heldout_path: str | None = None
    """The same, for what is only evaluated. null: held out of the others."""
    num_heldout: int = Field(default=256, ge=1)
    """Prompts that accuracy is measured on, and that are never trained on."""
    num_validation: int = Field(default=256, ge=1)
    """Problems that sft.stop_pass_rate is measured on, held out if that is set."""
    max_number: int = Field(default=9999, ge=9)
    """Largest number that is doubled in the problems made here."""
    careless_share: float = Field(default=0.6, ge=0, le=1)
    """Share of the demonstrations made here that forget to carry; GRPO has to correct them."""
    use_chat_template: bool = False
    """Render each prompt as a user's message with the tokenizer's chat template."""


class RewardSection(Section):
    """The reward: 1 where the text of the answer is exactly right, otherwise 0."""

    answer_pattern: str | None = None
    """Regular expression whose last match in the completion is its answer: the first group, or
    all of it. null: the completion is the answer, without the white space around it."""


class RefitSection(Section):
    """Sending weights to inference engines, if policy.generation.backend names some."""

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
    """Newest checkpoints that are kept; the best, by accuracy, is kept besides."""


class RunConfig(Section):
    """A run of one recipe: the sections that every run has.

    The type of a run's configuration is a subclass, made by `run_config_type`, that has the
    recipe's sections too; `section` returns those by their type.
    """

    recipe: str
    """The command: a recipe that an installed package registers."""
    seed: int = Field(default=0, ge=0)
    """Of data, order, the model built here and, if policy.seed is not set, the workers."""
    policy: Settings
    """The policy: the keys of `rl_interfaces.PolicyConfig`."""
    cluster: ClusterSection = ClusterSection()
    tiny_model: TinyModelSection = TinyModelSection()
    data: DataSection = DataSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @field_validator("policy")
    @classmethod
    def _complete_policy(cls, policy: Settings) -> Settings:
        return resolve_policy(policy)

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        _check_tokenizer(self)
        _check_sizes(self)
        find_recipe(self.recipe).check(self)
        return self

    def section(self, kind: type[SectionT]) -> SectionT:
        """Return the section of a type that the recipe brings.

        Raises:
            LookupError: The recipe has no such section.
        """
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, kind):
                return value
        raise LookupError(f"a run of {self.recipe!r} has no section of the type {kind.__name__}")

    @property
    def has_builtin_model(self) -> bool:
        """Whether the model is built by the run."""
        return self.policy["model_name"] == BUILTIN_MODEL

    @property
    def has_engines(self) -> bool:
        """Whether inference engines sample for the recipe."""
        if not find_recipe(self.recipe).samples_with_engines:
            return False
        return self.policy["generation"]["backend"] != WORKERS_OWN

    @property
    def is_colocated(self) -> bool:
        """Whether engines share the policy's devices."""
        return self.policy["generation"].get("colocated", {}).get("enabled", True)

    @property
    def engine_bundles(self) -> list[int]:
        """Devices on each node for engines that do not share the policy's; one by default."""
        resources = self.policy["generation"].get("colocated", {}).get("resources", {})
        return [resources.get("gpus_per_node", 1)] * resources.get("num_nodes", 1)


def run_config_type(sections: Mapping[str, type[Section]]) -> type[RunConfig]:
    """Return `RunConfig` with further sections, `{key: type}`.

    Raises:
        ValueError: A key is one that every run has.
    """
    taken = sections.keys() & RunConfig.model_fields.keys()
    if taken:
        raise ValueError(f"the section {min(taken)!r} of a recipe is one that every run has")
    return _run_config_type(tuple(sections.items()))


# The same sections give the same type, as models of two types are never equal.
@cache
def _run_config_type(sections: tuple[tuple[str, type[Section]], ...]) -> type[RunConfig]:
    fields: dict[str, Any] = {key: (kind, kind()) for key, kind in sections}
    return create_model("RunConfig", __base__=RunConfig, **fields)


def check_sampling(config: RunConfig) -> None:
    """Raise `ValueError` unless the policy can sample completions, which also measure accuracy."""
    generation = config.policy.get("generation")
    if generation is None:
        raise ValueError("policy.generation is not set: the recipe samples completions")
    longest, new = config.policy["max_total_sequence_length"], generation["max_new_tokens"]
    if new >= longest:
        raise ValueError(
            f"policy.generation.max_new_tokens={new} leaves no room for a prompt in "
            f"policy.max_total_sequence_length={longest}"
        )


def _check_tokenizer(config: RunConfig) -> None:
    name = config.policy["tokenizer"]["name"]
    if config.has_builtin_model and name != BUILTIN_MODEL:
        raise ValueError(
            f"policy.tokenizer.name={name!r} contradicts policy.model_name={BUILTIN_MODEL!r}: "
            "the model that is built here has its own tokenizer"
        )


def _check_sizes(config: RunConfig) -> None:
    if "max_total_sequence_length" not in config.policy:
        raise ValueError("policy.max_total_sequence_length is not set: most tokens of a sequence")
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
