"""The configuration of a run: its sections and defaults, read from files and overrides.

    YAML file, then section.key=value  --over-->  defaults  --checked-->  RunConfig  -->  YAML

A recipe brings sections of its own: the type of a run's configuration is composed of those that
every run has and the recipe's, see `run_config_type`. Keys, types and ranges are pydantic's to
check; the section `policy` is `rl_interfaces.resolve_policy_config`'s.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from rl_interfaces import resolve_policy_config
from rl_interfaces.config.resolve import merge_sections
from rl_interfaces.config.schema import MOST

from rl_policy.backends import WORKERS_OWN
from rl_policy.data.rewards import GivenReward
from rl_policy.data.rows import GivenRows
from rl_policy.recipes import Recipe, find_recipe, installed_recipes

SectionT = TypeVar("SectionT", bound="Section")

Settings: TypeAlias = dict[str, Any]
"""Nested settings as in YAML. No TypedDict has all their keys, as a third party's backend has a
section of its own."""

BUILTIN_MODEL = "builtin"
"""The value of `policy.model_name` for the model that a run builds."""

# 4 GiB in float32, beside as much of gradients and twice as much of Adam's moments.
_MOST_TINY_WEIGHTS = 2**30

DEFAULT_POLICY: Settings = {
    # Runs everywhere. bfloat16 is the better choice on a recent GPU.
    "precision": "float32",
    "train_global_batch_size": 32,
    "train_micro_batch_size": 4,
    "logprob_batch_size": 4,
    "generation_batch_size": 32,
    "max_total_sequence_length": 512,
    "max_grad_norm": 1.0,
    # A learning rate at which fine-tuning of a pretrained model is stable.
    "optimizer": {
        "name": "torch.optim.AdamW",
        "kwargs": {"lr": 1.0e-6, "betas": [0.9, 0.95], "weight_decay": 0.0},
    },
    "generation": {"backend": "hf", "max_new_tokens": 128, "temperature": 1.0},
    # A small model is not sharded: gathering it takes longer than computing with it.
    "dtensor_cfg": {"enabled": True, "data_parallel_replicate_size": "auto"},
}
"""The command line's own defaults, over those of `rl_interfaces`."""

BUILTIN_POLICY: Settings = {
    "train_global_batch_size": 256,
    "train_micro_batch_size": 128,
    "logprob_batch_size": 256,
    "generation_batch_size": 256,
    "max_total_sequence_length": 32,
    "optimizer": {"kwargs": {"lr": 3.0e-4}},
    "generation": {
        "max_new_tokens": 6,
        # Compilation and graph capture take longer than a run of a model this small.
        "vllm_cfg": {"enforce_eager": True, "kv_cache_memory_bytes": 64 * 2**20},
    },
}
"""Over `DEFAULT_POLICY` in a run that builds its own model, of about a hundred thousand parameters:
batch sizes and a learning rate that a large model could not use."""


def merge_policy(base: Mapping[str, object], given: Mapping[str, object]) -> Settings:
    """Return `given` merged over `base`, section by section.

    The optimizer of `base` is dropped if `given` names another, and its backend is disabled if
    `given` enables one.
    """
    kept: Settings = copy.deepcopy(dict(base))
    if _optimizer_name(given) not in (None, _optimizer_name(kept)):
        # Keyword arguments of one optimizer are unknown to another.
        kept.pop("optimizer", None)
    if any(_is_enabled(key, value) for key, value in given.items()):
        kept = {
            key: {**value, "enabled": False} if _is_enabled(key, value) else value
            for key, value in kept.items()
        }
    return merge_sections(kept, given)


def resolve_policy(policy: Mapping[str, object], *, path: str = "policy") -> Settings:
    """Return the complete section; without a model's name it is that of the built-in model.

    Args:
        policy: The section; keys may be missing.
        path: Prefix of the keys in errors.

    Raises:
        ValueError: As `rl_interfaces.resolve_policy_config`, or `async_checkpoint` is on: a run
            relies on a checkpoint being complete when the call returns.
    """
    if policy.get("model_name") is None:
        policy = {**policy, "model_name": BUILTIN_MODEL}
    resolved = resolve_policy_config(policy, path=path)
    if resolved["dtensor_cfg"]["async_checkpoint"]:
        raise ValueError(
            f"{path}.dtensor_cfg.async_checkpoint=True is not supported by a recipe's run, which "
            "renames a checkpoint once it is saved: leave it out, or drive a Policy yourself"
        )
    return resolved


def _optimizer_name(policy: Mapping[str, object]) -> object:
    optimizer = policy.get("optimizer")
    return optimizer.get("name") if isinstance(optimizer, Mapping) else None


def _is_enabled(key: str, value: object) -> bool:
    return key.endswith("_cfg") and isinstance(value, Mapping) and bool(value.get("enabled"))


class Section(BaseModel):
    """A section: immutable, and without unknown keys or conversions between types."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def _names_or_given(value: Any, kind: type, *, key: str) -> Any:
    """Return a name, a value that Python gives, a list of those, or None, as they are.

    Raises:
        ValueError: It is none of them; one line that names the key.
    """
    if value == []:
        raise ValueError(f"{key}=[] names nothing: give one, or null")
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, kind) or value is None:
            continue
        if not isinstance(each, str):
            raise ValueError(f"{key}={value!r}: input should be a valid string or a list of them")
        if not each:
            raise ValueError(f"{key}={value!r}: string should have at least 1 character")
        if each[0] + each[-1] == "<>":
            raise ValueError(
                f"{key}={value!r} was given by a Python program: continue the run there, where it "
                "is given again"
            )
    return value


class ClusterSection(Section):
    """The devices. The keys but `restarts` are the arguments of `rl_policy.RayVirtualCluster`."""

    bundle_ct_per_node_list: list[Annotated[int, Field(ge=1, le=MOST)]] = Field(
        default=[2], min_length=1
    )
    """Workers on each node."""
    use_gpus: bool | None = None
    """Whether a worker gets a GPU. null: if there are any."""
    num_gpus_per_node: int = Field(default=8, ge=1, le=MOST)
    """Most GPUs that a node has."""
    placement_group_strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """Ray's strategy for the workers of a node."""
    restarts: int = Field(default=0, ge=0, le=MOST)
    """How often a worker may die before the run ends: until then all workers are started again, and
    continue from the newest checkpoint."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `rl_policy.RayVirtualCluster`."""
        return self.model_dump(exclude={"restarts"})


class TinyModelSection(Section):
    """The Qwen2 model that is built if `policy.model_name` is not set."""

    hidden_size: int = Field(default=64, ge=32, le=2**16)
    """Width; a multiple of head_size."""
    intermediate_size: int = Field(default=256, ge=1, le=2**18)
    """Width of the MLPs."""
    num_layers: int = Field(default=2, ge=1, le=2**10)
    """Layers."""
    head_size: int = Field(default=32, ge=32, le=2**16)
    """Width of an attention head. Inference engines refuse less than 32."""
    initializer_range: float = Field(default=0.1, gt=0, le=10)
    """Standard deviation of the weights. At this width, the 0.02 of large models learns slowly."""


class DataSection(Section):
    """The training data: the user's problems or preference pairs, or generated doublings."""

    path: str | list[str] | SkipValidation[GivenRows] | None = None
    """JSON lines with the texts `prompt` and `answer`; for preferences `prompt`, `chosen` and
    `rejected`. Or Parquet, a directory or the name of a Hugging Face dataset, or several of these.
    null: doublings."""
    heldout_path: str | list[str] | SkipValidation[GivenRows] | None = None
    """Data of the same format, for evaluation only. null: held out of the training data."""
    weights: list[Annotated[float, Field(gt=0)]] | None = None
    """Of several paths, in their order: their shares in what is drawn. null: all rows alike."""
    columns: dict[Literal["prompt", "answer", "chosen", "rejected", "messages"], str] = {}
    """Names of the data for ours, for example {prompt: question}."""
    split: str = Field(default="train", min_length=1)
    """The split of a Hugging Face dataset that has several."""
    num_heldout: int = Field(default=256, ge=1, le=MOST)
    """Prompts that accuracy is measured on, and that are never trained on."""
    num_validation: int = Field(default=256, ge=1, le=MOST)
    """Problems that sft.stop_pass_rate is measured on, held out if that is set."""
    # All of them are in memory, each as a problem and several demonstrations.
    max_number: int = Field(default=9999, ge=9, le=1_000_000)
    """Largest number that is doubled in the problems made here."""
    careless_share: float = Field(default=0.6, ge=0, le=1)
    """Share of the demonstrations made here that forget to carry; GRPO has to correct them."""
    use_chat_template: bool = False
    """Render each prompt as a user's message with the tokenizer's chat template. Prompts that are
    conversations always are rendered."""

    @field_validator("path", "heldout_path", mode="plain")
    @classmethod
    def _names_or_rows(cls, value: Any, info: ValidationInfo) -> Any:
        return _names_or_given(value, GivenRows, key=f"data.{info.field_name}")

    @model_validator(mode="after")
    def _check_weights(self) -> DataSection:
        count = len(self.path) if isinstance(self.path, list) else 1
        if self.weights is not None and len(self.weights) != count:
            raise ValueError(
                f"data.weights={self.weights} gives {len(self.weights)} weights for the {count} of "
                f"data.path={self.path}"
            )
        return self


class RewardSection(Section):
    """The reward: 1 if the text of the answer is exactly right, otherwise 0, or your functions."""

    function: str | SkipValidation[GivenReward] | list[str | SkipValidation[GivenReward]] | None = (
        None
    )
    """`FILE.py:NAME` or `PACKAGE.MODULE:NAME`: a function of a list of completions and a list of
    problems, async or not, that returns a number for each. It runs in a process of its own. Several
    are added up; `exact_match` among them is the reward without functions."""
    weights: list[float] | None = None
    """Of several functions, in their order. null: 1 each."""
    timeout_s: float = Field(default=60.0, gt=0, le=MOST)
    """Most seconds of a call of a function, and of its import."""

    answer_pattern: str | None = Field(default=None, min_length=1)
    """Regular expression whose last match in the completion is its answer: the first group, or
    all of it. null: the completion, stripped of white space, is the answer."""

    @field_validator("function", mode="plain")
    @classmethod
    def _names_or_functions(cls, value: Any) -> Any:
        return _names_or_given(value, GivenReward, key="reward.function")

    @property
    def functions(self) -> list[str | GivenReward]:
        """The functions; empty for the reward without any."""
        if self.function is None:
            return []
        return self.function if isinstance(self.function, list) else [self.function]


class RefitSection(Section):
    """Sending weights to inference engines, if policy.generation.backend names some."""

    transport: str | None = Field(default=None, min_length=1)
    """`shm`, `cuda_ipc`, `collective`, `golden`, or a third party's. null: the fastest that reaches
    the engines."""
    bucket_mib: int | None = Field(default=None, ge=1, le=MOST)
    """Size of each of two buffers, in MiB. null: by the model's size."""
    verify: Literal["none", "digest", "weights", "logprobs"] = "digest"
    """`digest` checks every buffer before it is loaded; `weights` the live parameters too, of
    engines that can yield them by name, which vLLM cannot; `logprobs`, besides the digest, ends the
    run where mismatch_max_abs is over max_mismatch."""
    max_mismatch: float | None = Field(default=None, gt=0)
    """Most nats between an engine's log-probability of a sampled token and the trainer's. On a CPU
    float32 stays under 1e-4; bfloat16 is off by some hundredths."""


class CheckpointSection(Section):
    """Checkpoints of a run, from which `--resume` continues it."""

    every: int = Field(default=25, ge=1, le=MOST)
    """Steps between two checkpoints."""
    keep_last: int = Field(default=2, ge=1, le=MOST)
    """Newest checkpoints that are kept; the best, by accuracy, is kept besides."""
    skip_when_full: bool = False
    """Go on without a checkpoint for which the disk has no room. false: the run ends."""


class TrackingSection(Section):
    """How the trackers of `logger` name a run; their environment variables say where they write."""

    project: str = Field(default="rl-policy", min_length=1)
    """The project, an experiment in MLflow."""
    name: str | None = Field(default=None, min_length=1)
    """The run's name. null: that of its directory."""


class ReportSection(Section):
    """What a run records for `report.html`, and whether it writes it."""

    samples: int = Field(default=8, ge=0, le=2**16)
    """Completions of each evaluation, and of the training batch before it, in `samples.jsonl`."""
    at_end: bool = True
    """Write `report.html` at the end of the run if plotly, of the extra `report`, is installed."""


class RunConfig(Section):
    """A run of one recipe: the sections that every run has.

    The type of a run's configuration is a subclass made by `run_config_type`, with the recipe's
    sections as further fields; `section` returns those by their type.
    """

    recipe: str
    """The command: a recipe that an installed package registers."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of data, order, the model built here and, if policy.seed is not set, the workers."""
    policy: Settings
    """The policy: the keys of `rl_interfaces.PolicyConfig`."""
    cluster: ClusterSection = ClusterSection()
    tiny_model: TinyModelSection = TinyModelSection()
    data: DataSection = DataSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logger: list[str] = ["jsonl"]
    """Trackers: `tensorboard`, `wandb`, `trackio`, `mlflow`, each an extra of the package. `jsonl`
    is metrics.jsonl, which is always written, as a resumed run and the report read it."""
    tracking: TrackingSection = TrackingSection()
    report: ReportSection = ReportSection()

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
        """Return the recipe's section of a given type.

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
        """Devices per node of engines that do not share the policy's; one by default."""
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


# Cached, as two configurations of different types are never equal to pydantic.
@cache
def _run_config_type(sections: tuple[tuple[str, type[Section]], ...]) -> type[RunConfig]:
    fields: dict[str, Any] = {key: (kind, kind()) for key, kind in sections}
    return create_model("RunConfig", __base__=RunConfig, **fields)


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
    num_weights = (
        model.num_layers * model.hidden_size * (4 * model.hidden_size + 3 * model.intermediate_size)
    )
    if num_weights > _MOST_TINY_WEIGHTS:
        raise ValueError(
            f"tiny_model.num_layers={model.num_layers}, hidden_size={model.hidden_size} and "
            f"intermediate_size={model.intermediate_size} give {num_weights} parameters, more than "
            f"{_MOST_TINY_WEIGHTS}: set policy.model_name for a model of that size"
        )
    _check_devices(config.cluster)


def _check_devices(cluster: ClusterSection) -> None:
    for node, count in enumerate(cluster.bundle_ct_per_node_list):
        if cluster.use_gpus and count > cluster.num_gpus_per_node:
            raise ValueError(
                f"cluster.bundle_ct_per_node_list[{node}]={count} is more than "
                f"cluster.num_gpus_per_node={cluster.num_gpus_per_node}, with cluster.use_gpus=True"
            )


def load_run_config(
    recipe: str, *, path: Path | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    """Return the configuration of a new run.

    Args:
        recipe: The command.
        path: A YAML file. It may hold sections of other installed recipes, so that one file serves
            several commands; those are checked for keys and types only.
        overrides: `section.key=value`, the value in YAML; they take precedence over the file.

    Raises:
        ValueError: The file cannot be read, or its content is wrong; one line that names the key.
    """
    given = read_yaml(path) if path is not None else {}
    return new_run_config(recipe, merge_sections(given, parse_overrides(overrides)))


def new_run_config(recipe: str, given: Mapping[str, object]) -> RunConfig:
    """Return the configuration of a new run, with the command line's defaults for missing keys.

    Args:
        recipe: The command.
        given: Sections; they may be of other installed recipes, as in `load_run_config`.

    Raises:
        ValueError: Names the key and the value, in one line.
    """
    given = dict(given)
    if given.setdefault("recipe", recipe) != recipe:
        raise ValueError(f"recipe={given['recipe']!r} contradicts the command {recipe!r}")
    return parse_run_config(_add_defaults(given, find_recipe(recipe)))


def parse_run_config(given: Mapping[str, object]) -> RunConfig:
    """Return the checked configuration, with the sections' own defaults for missing keys.

    Raises:
        ValueError: Names the key and the value, in one line.
    """
    recipe = given.get("recipe")
    if not isinstance(recipe, str):
        raise ValueError(f"recipe={recipe!r} must be the name of a recipe")
    kind = _config_type(find_recipe(recipe), given)
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        entries = error.errors(include_url=False)
        raise ValueError("; ".join(_describe(entry, kind) for entry in entries)) from None


def override_resumed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a resumed run.

    Args:
        config: That of the interrupted run.
        overrides: `section.key=value`; only the recipe's numbers of steps, `cluster.restarts`,
            `logger` and `checkpoint.*`, which leave the steps taken so far valid.

    Raises:
        ValueError: Another key, or an invalid value.
    """
    return override_resumed_with(config, parse_overrides(overrides))


def override_resumed_with(config: RunConfig, given: Mapping[str, object]) -> RunConfig:
    """Return the same for nested settings.

    Raises:
        ValueError: As `override_resumed`.
    """
    allowed = [*find_recipe(config.recipe).step_keys, "cluster.restarts", "logger"]
    for key in flatten(given):
        if key not in allowed and not key.startswith("checkpoint."):
            raise ValueError(
                f"{key} cannot change when a run is resumed: only {', '.join(allowed)} and "
                "checkpoint.* can"
            )
    return parse_run_config(merge_sections(config.model_dump(), given))


def read_yaml(path: Path) -> Settings:
    """Return the mapping in a YAML file.

    Raises:
        ValueError: The file cannot be read or holds no mapping; names the file.
    """
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except RecursionError:
        raise ValueError(f"cannot read the config {path}: it is nested too deeply") from None
    # ValueError: bytes that are no UTF-8, a null byte in the path, a number of 5000 digits.
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"cannot read the config {path}: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"the config {path} must hold a mapping")
    return {str(key): value for key, value in content.items()}


def parse_overrides(overrides: Sequence[str]) -> Settings:
    """Return `section.key=value` arguments as nested mappings.

    Raises:
        ValueError: An argument has no `=`, or a value is no YAML.
    """
    seen: dict[str, str] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not (key and equals):
            raise ValueError(f"cannot read {override!r}: expected section.key=value")
        if not value.strip():
            raise ValueError(f"{key}= has no value: give one, or {key}=null for none")
        if key in seen:
            raise ValueError(f"{key} is given twice, as {seen[key]} and {override}: give it once")
        seen[key] = override
    given = " ".join(overrides)
    try:
        content = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)), resolve=True)
    except RecursionError:
        raise ValueError(f"cannot read {given[:80]}: it is nested too deeply") from None
    except (AttributeError, TypeError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"cannot read {given}: {_one_line(error)}") from error
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key, as the command line takes them.

    Example:
        flatten({"grpo": {"steps": 3}}) -> {"grpo.steps": 3}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nest(settings: Mapping[str, Any]) -> Settings:
    """Return settings with dotted keys, in whatever depth, as nested ones.

    Example:
        nest({"grpo.steps": 2, "grpo": {"epochs_per_step": 3}})
        -> {"grpo": {"steps": 2, "epochs_per_step": 3}}

    Raises:
        ValueError: A key is given twice.
    """
    nested: Settings = {}
    for key, value in settings.items():
        inner: Any = nest(value) if isinstance(value, Mapping) else value
        for part in reversed(str(key).split(".")):
            inner = {part: inner}
        nested = join_settings(nested, inner)
    return nested


def join_settings(first: Settings, second: Settings, *, path: str = "") -> Settings:
    """Return the keys of both.

    Args:
        first: Nested settings.
        second: Others.
        path: Prefix of their keys in errors.

    Raises:
        ValueError: Both have a key.
    """
    for key in first.keys() & second.keys():
        if not (isinstance(first[key], Mapping) and isinstance(second[key], Mapping)):
            raise ValueError(
                f"{path}{key} is given twice, as {_plain(first[key])!r} and "
                f"{_plain(second[key])!r}: give it once"
            )
        join_settings(first[key], second[key], path=f"{path}{key}.")
    return merge_sections(first, second)


def render_run_config(config: RunConfig) -> str:
    """Return the configuration as YAML, with a comment above each key."""
    return "\n".join(_render(config, indent="")) + "\n"


def _add_defaults(given: Settings, recipe: Recipe) -> Settings:
    """Return `given` over the defaults of `policy` and, if it is used, the built-in model's."""
    policy = given.get("policy") or {}
    if not isinstance(policy, Mapping):
        raise ValueError(f"policy must be a mapping, got {type(policy).__name__} {policy!r}")
    is_builtin = policy.get("model_name") in (None, BUILTIN_MODEL)
    layers = [recipe.defaults]
    if is_builtin:
        layers += [BUILTIN_POLICY, recipe.builtin.get("policy", {})]
    base = DEFAULT_POLICY
    for layer in layers:
        base = merge_policy(base, layer)
    complete = merge_sections({**(recipe.builtin if is_builtin else {}), "policy": {}}, given)
    complete["policy"] = merge_policy(base, policy)
    complete["policy"].setdefault("seed", given.get("seed", RunConfig.model_fields["seed"].default))
    if is_builtin:
        complete["policy"]["model_name"] = BUILTIN_MODEL
    return complete


def _config_type(recipe: Recipe, given: Mapping[str, object]) -> type[RunConfig]:
    """Return the type of a run's configuration, with the given sections of other recipes too.

    Another recipe may not be importable, so it is imported only if a key is unknown without it.
    """
    sections = dict(recipe.sections)
    unknown = given.keys() - RunConfig.model_fields.keys() - sections.keys()
    for name in installed_recipes():
        if not unknown:
            break
        for key, kind in find_recipe(name).sections.items():
            if key in unknown:
                sections[key] = kind
                unknown.remove(key)
    return run_config_type(sections)


def _describe(entry: ErrorDetails, kind: type[RunConfig]) -> str:
    key = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "value_error":  # raised by our own checks, which name the key themselves
        return str(entry.get("ctx", {})["error"])
    if entry["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(entry["loc"][-1]), _keys_beside(entry["loc"], kind), 1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return f"{key} is not a known key{hint}"
    message = entry["msg"]
    return f"{key}={entry['input']!r}: {message[:1].lower()}{message[1:]}"


def _keys_beside(location: tuple[int | str, ...], kind: type[BaseModel]) -> list[str]:
    """Return the known keys of the section in which an unknown key was found."""
    for part in location[:-1]:
        inner = kind.model_fields[str(part)].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    known = list(kind.model_fields)
    return known if len(location) > 1 else [*known, *installed_recipes()]


def _render(section: BaseModel, *, indent: str) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            summary = (type(value).__doc__ or "").strip()
            yield from ("", *_comment(summary, indent=indent), f"{indent}{name}:")
            yield from _render(value, indent=indent + "  ")
            continue
        yield from _comment(field.description or "", indent=indent)
        text = cast(str, yaml.safe_dump({name: _plain(value)}, sort_keys=False))
        yield from (indent + line for line in text.rstrip().splitlines())


def _plain(value: Any) -> Any:
    """Return a value with a name in place of what Python gave."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, GivenRows | GivenReward) else value


def _comment(text: str, *, indent: str) -> Iterator[str]:
    return (f"{indent}# {line.strip()}" for line in text.splitlines())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
