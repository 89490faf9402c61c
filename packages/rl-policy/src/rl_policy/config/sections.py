"""The sections of a run: their keys, defaults and ranges, and the checks that join several.

A recipe brings sections of its own: `run_config_type` composes the type of a run's configuration
of those that every run has and the recipe's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from rl_interfaces.config.schema import MOST

from rl_policy.backends import WORKERS_OWN
from rl_policy.config.policy import BUILTIN_MODEL, Settings, resolve_policy
from rl_policy.data.rewards import GivenReward
from rl_policy.data.rows import GivenRows
from rl_policy.environments.pool import GivenEnvironment
from rl_policy.recipes import find_recipe

SectionT = TypeVar("SectionT", bound="Section")

EXACT_MATCH = "exact_match"
"""Among `reward.function`: the reward of a run without functions."""

# 4 GiB in float32, beside as much of gradients and twice as much of Adam's moments.
_MOST_TINY_WEIGHTS = 2**30


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


def _two_workers() -> list[int]:
    # Not with the module: without torch a configuration is read in a fraction of the time.
    import torch

    return [1 if torch.cuda.device_count() == 1 else 2]


class ClusterSection(Section):
    """The devices. The first four keys are arguments of `rl_policy.RayVirtualCluster`."""

    bundle_ct_per_node_list: list[Annotated[int, Field(ge=1, le=MOST)]] = Field(
        default_factory=_two_workers, min_length=1
    )
    """Workers on each node. By default two, on a machine with a single GPU one."""
    use_gpus: bool | None = None
    """Whether a worker gets a GPU. null: if there are any."""
    num_gpus_per_node: int = Field(default=8, ge=1, le=MOST)
    """Most GPUs that a node has."""
    placement_group_strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """Ray's strategy for the workers of a node."""
    restarts: int = Field(default=0, ge=0, le=MOST)
    """How often a worker may die before the run ends: until then all workers are started again, and
    continue from the newest checkpoint."""
    fork_workers: bool = True
    """Whether a Ray that a recipe's command starts forks its workers from one process, which has
    imported what they need. false: each imports it, which takes seconds more."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `rl_policy.RayVirtualCluster`."""
        return self.model_dump(exclude={"restarts", "fork_workers"})


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
    """JSON lines with `prompt` and `answer`; for preferences `prompt`, `chosen` and `rejected`. Or
    Parquet, a directory or the name of a Hugging Face dataset, or several of these. null:
    doublings, which only the model that is built here is trained on."""
    heldout_path: str | list[str] | SkipValidation[GivenRows] | None = None
    """Data of the same format, for evaluation only. null: held out of the training data."""
    weights: list[Annotated[float, Field(gt=0)]] | None = None
    """Of several paths, in their order: their shares in what is drawn. null: all rows alike."""
    columns: dict[Literal["prompt", "answer", "chosen", "rejected", "messages", "tools"], str] = {}
    """Names of the data for ours, for example {prompt: question, answer: solution}. A row that has
    our name alone is read by that."""
    split: str = Field(default="train", min_length=1)
    """The split of a Hugging Face dataset that has several."""
    num_heldout: int | None = Field(default=None, ge=1, le=MOST)
    """Prompts that are measured and never trained on, with all of their rows. null: 256, at most a
    tenth of the prompts."""
    num_validation: int | None = Field(default=None, ge=1, le=MOST)
    """Prompts that sft.stop_pass_rate is measured on, held out if that is set. null: 256, at most a
    tenth."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """Rows with more tokens than a sequence may have: `error` refuses them before the start, `drop`
    leaves them out, `truncate` cuts an answer at its end, and a prompt that is sampled from at its
    beginning. They are counted, and the first is named."""
    # All of them are in memory, each as a problem and several demonstrations.
    max_number: int = Field(default=9999, ge=9, le=1_000_000)
    """Largest number that is doubled in the problems made here."""
    careless_share: float = Field(default=0.6, ge=0, le=1)
    """Share of the demonstrations made here that forget to carry; GRPO has to correct them."""
    use_chat_template: bool = False
    """Render each prompt as a user's message with the tokenizer's chat template. Prompts that are
    conversations always are rendered."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """The system message of conversations that have none. null: they stay without."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, for example {enable_thinking: false}."""

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

    @property
    def is_solved_share(self) -> bool:
        """Whether the mean reward is the share of the problems that are solved."""
        return self.functions in ([], [EXACT_MATCH]) and self.weights in (None, [1.0])


class EnvironmentSection(Section):
    """An environment that the policy talks to over several turns, which rewards it."""

    function: str | SkipValidation[GivenEnvironment] | None = None
    """`FILE.py:NAME` or `PACKAGE.MODULE:NAME`: a class with `reset` and `step`, or a function that
    returns such an object, see `rl_interfaces.Environment`; or an agent, a function of a problem
    and an endpoint of OpenAI's protocol. It runs in processes of its own. null: a completion is all
    there is, and `reward` rewards it."""
    max_turns: int = Field(default=8, ge=1, le=MOST)
    """Most turns of the policy in an episode."""
    timeout_s: float = Field(default=60.0, gt=0, le=MOST)
    """Most seconds of a call of `reset` or `step`."""
    processes: int = Field(default=64, ge=1, le=4096)
    """Most processes, each with the episodes of one prompt: a step of more prompts is sampled in
    several batches."""
    role: Literal["user", "tool"] = "user"
    """Of an observation, where the chat template renders the prompt."""

    @field_validator("function", mode="plain")
    @classmethod
    def _name_or_class(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError(f"environment.function={value!r}: input should be a valid string")
        return _names_or_given(value, GivenEnvironment, key="environment.function")


class RefitSection(Section):
    """Sending weights to inference engines, if policy.generation.backend names some."""

    transport: str | None = Field(default=None, min_length=1)
    """`shm`, `cuda_ipc`, `collective`, `chain`, `golden`, or a third party's. null: `cuda_ipc`
    on GPUs that policy and engines share, `shm` on shared CPUs, `collective` to engines apart."""
    bucket_mib: int | None = Field(default=None, ge=1, le=MOST)
    """Size of each of two buffers, in MiB. null: by the model's size."""
    verify: Literal["none", "digest", "weights", "logprobs"] = "digest"
    """`digest` checks every buffer before it is loaded; `weights` the live parameters too, of
    engines that can yield them by name, which vLLM cannot; `logprobs`, besides the digest, ends the
    run where mismatch_max_abs is over max_mismatch."""
    staging: Literal["auto", "host", "off"] = "auto"
    """Where engines receive new weights while they sample from the old ones: `host` memory; `auto`
    for the device or the host where there is room, if engines have devices of their own; `off`:
    engines pause for the whole refit. It takes the memory of a second set of weights. A refit that
    fails then leaves the old version sampling."""
    delta: bool = False
    """Send only what has changed since the refit before, bit by bit, and check the digest of the
    full weights: for engines on other machines, whose network is slower than memory. The trainer
    and every worker of an engine keep a copy of the weights in host memory; where that has no room,
    and to a new engine, everything is sent. Not yet from GPUs."""
    slices: bool = False
    """Send each worker of an engine the slices that it loads, from the ranks that hold them: no
    rank gathers a whole tensor. They pass through host memory. With `delta`, what has changed in
    them."""
    adapters: Literal["merged", "alone"] = "merged"
    """How low-rank adapters (policy.dtensor_cfg.lora) reach engines: `merged` into all weights, for
    any engine; `alone`: engines get the weights that they belong to once, and with each refit the
    adapters, which vLLM applies itself. That is far fewer bytes, and two more products per layer in
    every step of an engine."""
    kv_cache: Literal["drop", "keep"] = "drop"
    """What becomes of requests that run when staged weights take over: `drop` computes their keys
    and values again with the new weights, `keep` goes on with the old ones."""
    max_mismatch: float | None = Field(default=None, gt=0)
    """Most nats between an engine's log-probability of a sampled token and the trainer's. On a CPU
    float32 stays under 1e-4; bfloat16 is off by some hundredths."""

    @field_validator("staging", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: Any) -> Any:
        # YAML reads the word `off` as false.
        return "off" if value is False else value


class CheckpointSection(Section):
    """Checkpoints of a run, from which `--resume` continues it."""

    every: int = Field(default=25, ge=1, le=MOST)
    """Steps between two checkpoints."""
    keep_last: int = Field(default=2, ge=1, le=MOST)
    """Newest checkpoints that are kept; the best on held-out data is kept besides."""
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
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    tiny_model: TinyModelSection = TinyModelSection()
    data: DataSection = DataSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logger: list[str] = ["jsonl"]
    """Trackers: `tensorboard`, `wandb`, `trackio`, `mlflow`, each an extra of the package. `jsonl`
    is metrics.jsonl, which is always written, as a resumed run and the report read it."""
    tracking: TrackingSection = TrackingSection()
    report: ReportSection = ReportSection()

    @field_validator("logger", mode="before")
    @classmethod
    def _check_logger(cls, logger: object) -> object:
        if isinstance(logger, str):
            raise ValueError(f"is a list of names: logger=[{logger}]")
        return logger

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
