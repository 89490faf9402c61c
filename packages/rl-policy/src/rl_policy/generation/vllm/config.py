"""The section `generation` of a config, parsed once for vLLM engines and their samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, TypedDict

from rl_interfaces import GenerationConfig
from rl_interfaces.backend.generation import SamplingConfig, Tokenizer, resolve_pad_id
from rl_interfaces.config.resolve import GENERATION_DEFAULTS
from rl_interfaces.config.schema import check_typed_dict

VLLM_DEFAULTS: dict[str, Any] = {
    # An engine per device.
    "tensor_parallel_size": 1,
    # The policy's own default, so that sampler and trainer round alike.
    "precision": "bfloat16",
    # Half of the device: a trainer that shares it has the other half.
    "gpu_memory_utilization": 0.5,
    # vLLM's own for a server; more rows wait their turn inside the engine.
    "max_num_seqs": 256,
    # CUDA graphs pay for their capture within a few steps.
    "enforce_eager": False,
    # The weights that `model_name` has; a refit replaces them.
    "load_format": "auto",
    # A stranger's checkpoint may bring code, which is for the user to allow.
    "trust_remote_code": False,
    # Weights wait on the CPU, so that an engine that sleeps needs no refit to go on.
    "sleep_level": 1,
    # An engine of a policy gets new weights after every step.
    "weight_transfer": True,
    # An hour: longer than a healthy batch, shorter than a night.
    "generate_timeout_s": 3600.0,
    "engine_kwargs": {},
}
"""Every default of the section `vllm_cfg`. A key that is not here has none."""

_PRECISIONS = ("float32", "bfloat16", "float16", "auto")
_POSITIVE_COUNTS = (
    "tensor_parallel_size",
    "max_num_seqs",
    "max_model_len",
    "kv_cache_memory_bytes",
)
# Below this vLLM raises the temperature by itself, and the log-probabilities would be another's.
_LOWEST_TEMPERATURE = 0.01
# What this package passes to vLLM, and the key that says it.
_OWN_ARGUMENTS = {
    "model": "generation.model_name",
    "tokenizer": "the policy's tokenizer",
    "dtype": "vllm_cfg.precision",
    "seed": "the argument seed",
    "logprobs_mode": "the contract: log-probabilities are those of the sampled distribution",
    "generation_config": "the keys of generation",
    "enable_sleep_mode": "generation.colocated.enabled",
    "weight_transfer_config": "vllm_cfg.weight_transfer",
    "data_parallel_size": "the number of bundles",
    "distributed_executor_backend": "vllm_cfg.tensor_parallel_size",
}


class VllmSection(TypedDict):
    """The section `vllm_cfg`: how each engine runs. Every key may be missing."""

    tensor_parallel_size: NotRequired[int]
    """Devices per engine, all on one node."""
    precision: NotRequired[str]
    """`float32`, `bfloat16`, `float16`, or `auto` for what the model's config says."""
    max_model_len: NotRequired[int | None]
    """Most tokens per row, prompt and completion. None: what the model allows."""
    max_num_seqs: NotRequired[int]
    """Rows that an engine generates at a time."""
    gpu_memory_utilization: NotRequired[float]
    """Part of a device's memory that an engine may take, in (0, 1]."""
    kv_cache_memory_bytes: NotRequired[int | None]
    """Bytes of the key-value cache. None: what `gpu_memory_utilization` leaves; 1 GiB on a CPU."""
    enforce_eager: NotRequired[bool]
    """True: no CUDA graphs and no compilation."""
    load_format: NotRequired[str]
    """vLLM's; `dummy` starts from random weights, for an engine that is refitted at once."""
    trust_remote_code: NotRequired[bool]
    """Whether code that comes with the model may run."""
    sleep_level: NotRequired[int]
    """What `finish_generation` does: 1 keeps the weights on the CPU, 2 drops them until a refit."""
    weight_transfer: NotRequired[bool]
    """Whether the engine can get new weights, through the plug-in of `rl-refit`."""
    generate_timeout_s: NotRequired[float]
    """Most seconds that one call of `generate` may take."""
    engine_kwargs: NotRequired[dict[str, Any]]
    """Further arguments of vLLM's `LLM`, passed on as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How each engine runs."""

    model_name: str
    """Name or directory of the model."""
    tensor_parallel_size: int
    """Devices per engine."""
    precision: str
    """The dtype of weights and activations."""
    max_num_seqs: int
    """Rows at a time."""
    gpu_memory_utilization: float
    """Part of a device's memory."""
    enforce_eager: bool
    """Neither graphs nor compilation."""
    load_format: str
    """Where the first weights come from."""
    trust_remote_code: bool
    """Whether the model's own code may run."""
    sleep_level: int
    """1 or 2, see `VllmSection`."""
    generate_timeout_s: float
    """Limit of one `generate`."""
    is_colocated: bool
    """Whether a trainer shares the devices, so that the engine has to sleep."""
    seed: int
    """Of everything random."""
    weight_transfer: bool
    """Whether it can get new weights."""
    max_model_len: int | None = None
    """Most tokens per row; None is the model's own limit."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of the key-value cache."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `LLM`."""


def generation_of_policy(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `generation` of a policy, with the policy's own values where it is silent.

    The engine then has the policy's model, precision and longest row.

    Args:
        policy: A resolved `PolicyConfig` that has the section.
    """
    generation = policy["generation"]
    inherited = {
        "precision": policy["precision"],
        "max_model_len": policy.get("max_total_sequence_length"),
        "trust_remote_code": policy["trust_remote_code"],
    }
    given: dict[str, Any] = generation.get("vllm_cfg") or {}
    section = inherited | {key: value for key, value in given.items() if value is not None}
    return {"model_name": policy["model_name"], **generation, "vllm_cfg": section}


def parse_engine_config(
    config: Mapping[str, Any], *, seed: int, path: str = "generation"
) -> EngineConfig:
    """Return the engine's part of a `GenerationConfig`, checked, defaults filled in.

    Args:
        config: A `GenerationConfig`.
        seed: Of everything random.
        path: How the errors name the config.

    Raises:
        ValueError: An unknown key, a wrong type, or a value out of range; names key and value.
    """
    check_typed_dict(config, GenerationConfig, path=path)
    if not config.get("model_name"):
        raise ValueError(f"{path}.model_name is not set: the name or directory of the model")
    path = f"{path}.vllm_cfg"
    given: dict[str, Any] = config.get("vllm_cfg") or {}
    check_typed_dict(given, VllmSection, path=path)
    section: dict[str, Any] = VLLM_DEFAULTS | {
        key: value for key, value in given.items() if value is not None
    }
    _check_section(section, path=path)
    colocated = config.get("colocated") or {}
    return EngineConfig(
        model_name=config["model_name"],
        is_colocated=colocated.get("enabled", True),
        seed=seed,
        **section,
    )


def parse_sampling_config(
    config: Mapping[str, Any], tokenizer: Tokenizer, *, batch_size: int, path: str = "generation"
) -> SamplingConfig:
    """Return the sampler's part of a `GenerationConfig`, checked, with the token ids it needs.

    The tokenizer's end token ends every row besides the configured ones.

    Args:
        config: A `GenerationConfig`.
        tokenizer: Its padding or end token pads, if the config names none.
        batch_size: Rows that an engine generates at a time.
        path: Prefix of the keys in errors.

    Raises:
        ValueError: A wrong type, a value out of range or no padding token; names key and value.
    """
    given = check_sampling(config, path=path)
    ends = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    sampling = SamplingConfig(
        max_new_tokens=given["max_new_tokens"],
        temperature=given["temperature"],
        top_p=given["top_p"],
        top_k=given.get("top_k"),
        stop_token_ids=tuple(sorted(ends.union(given.get("stop_token_ids", ())))),
        stop_strings=tuple(given.get("stop_strings", ())),
        pad_token_id=given.get("pad_token_id"),
        batch_size=batch_size,
    )
    return replace(sampling, pad_token_id=resolve_pad_id(sampling, tokenizer))


def check_sampling(config: Mapping[str, Any], *, path: str) -> dict[str, Any]:
    """Return a `GenerationConfig` with its defaults.

    Raises:
        ValueError: A wrong type or a value out of range; names key and value.
    """
    check_typed_dict(config, GenerationConfig, path=path)
    given = GENERATION_DEFAULTS | {key: entry for key, entry in config.items() if entry is not None}
    for key in ("max_new_tokens", "top_k"):
        if key in given and given[key] < 1:
            raise ValueError(f"{path}.{key}={given[key]} must be at least 1")
    temperature = given["temperature"]
    if not 0 <= temperature < math.inf:
        raise ValueError(f"{path}.temperature={temperature} must not be negative or infinite")
    if 0 < temperature < _LOWEST_TEMPERATURE:
        raise ValueError(
            f"{path}.temperature={temperature} is below {_LOWEST_TEMPERATURE}, the lowest that "
            "vLLM samples with: use 0 for greedy decoding"
        )
    if not 0 < given["top_p"] <= 1:
        raise ValueError(f"{path}.top_p={given['top_p']} must lie in (0, 1]")
    for text in given.get("stop_strings", ()):
        if not text:
            raise ValueError(f"{path}.stop_strings holds an empty text, which would end every row")
    return given


def count_engines(ranks_per_node: Mapping[str, int], *, tensor_parallel_size: int) -> int:
    """Return how many engines the bundles hold, each on one node.

    Args:
        ranks_per_node: Bundles by node.
        tensor_parallel_size: Bundles per engine.

    Raises:
        ValueError: An engine would span two nodes, or bundles would be left over.
    """
    for node, count in ranks_per_node.items():
        if count % tensor_parallel_size:
            raise ValueError(
                f"generation.vllm_cfg.tensor_parallel_size={tensor_parallel_size} does not divide "
                f"the {count} bundles of node {node}: an engine stays within a node"
            )
    return sum(ranks_per_node.values()) // tensor_parallel_size


def _check_section(section: Mapping[str, Any], *, path: str) -> None:
    for key in _POSITIVE_COUNTS:
        if key in section and section[key] < 1:
            raise ValueError(f"{path}.{key}={section[key]} must be at least 1")
    if not 0 < section["gpu_memory_utilization"] <= 1:
        value = section["gpu_memory_utilization"]
        raise ValueError(f"{path}.gpu_memory_utilization={value} must lie in (0, 1]")
    if section["precision"] not in _PRECISIONS:
        raise ValueError(f"{path}.precision={section['precision']!r} must be one of {_PRECISIONS}")
    if section["sleep_level"] not in (1, 2):
        raise ValueError(f"{path}.sleep_level={section['sleep_level']} must be 1 or 2")
    if not 0 < section["generate_timeout_s"] < math.inf:
        value = section["generate_timeout_s"]
        raise ValueError(f"{path}.generate_timeout_s={value} must be positive and finite")
    for key in section["engine_kwargs"]:
        if key in _OWN_ARGUMENTS or key in VllmSection.__annotations__:
            owner = _OWN_ARGUMENTS.get(key, f"vllm_cfg.{key}")
            raise ValueError(f"{path}.engine_kwargs.{key} is already set by {owner}")
