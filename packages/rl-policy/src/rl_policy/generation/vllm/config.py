"""The section `generation` of a config, parsed once: for vLLM's engines, and for their samples.

    GenerationConfig --parse_engine_config--> EngineConfig --engine_arguments--> vllm.LLM(...)
                     --parse_sampling_config--> SamplingConfig (see `requests`)

vLLM is not imported here: a config is checked before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from rl_interfaces import GenerationConfig
from rl_interfaces.backend.end_tokens import end_token_ids
from rl_interfaces.backend.generation import SamplingConfig, resolve_pad_id
from rl_interfaces.config.resolve import resolve_generation_config
from rl_interfaces.config.schema import check_typed_dict

from rl_policy.config.policy import absolute_if_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSection:
    """The section `vllm_cfg`: how each engine runs. Keys, types and defaults are these fields'."""

    # An engine per device.
    tensor_parallel_size: int = 1
    """Devices per engine, all on one node."""
    # The only size there is.
    pipeline_parallel_size: int = 1
    """1, as NeMo RL's files say: an engine is tensor parallel alone."""
    # Either way rows are submitted while others are sampled.
    async_engine: bool = False
    """NeMo RL's choice of vLLM's asynchronous engine. Here every engine takes rows while it samples
    others, and a row has the same samples with either value."""
    # The policy's own default, so that sampler and trainer round alike.
    precision: str = "bfloat16"
    """`float32`, `bfloat16`, `float16`, or `auto` for the dtype in the model's config."""
    max_model_len: int | None = None
    """Most tokens per row, prompt and completion. None: the model's own limit."""
    # vLLM's own for a server; further rows wait inside the engine.
    max_num_seqs: int = 256
    """Rows that an engine generates at a time."""
    # Half of the device, as a colocated trainer needs the other half.
    gpu_memory_utilization: float = 0.5
    """Fraction of a device's memory that an engine may use, in (0, 1]."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of the key-value cache. None: what `gpu_memory_utilization` leaves; 1 GiB on a CPU."""
    # CUDA graphs pay for their capture within a few steps.
    enforce_eager: bool = False
    """True: no CUDA graphs and no compilation."""
    # The weights of `model_name`; a refit replaces them.
    load_format: str = "auto"
    """vLLM's; `dummy` starts from random weights, for an engine that is refitted at once."""
    # Code in a checkpoint is untrusted.
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    # With the weights on the CPU, an engine resumes after sleep without a refit.
    sleep_level: int = 1
    """What `finish_generation` does: 1 keeps the weights on the CPU, 2 drops them until a refit."""
    # A policy's engines are refitted after every step.
    weight_transfer: bool = True
    """Whether the engine can be refitted, through the plug-in of `rl-refit`."""
    # Merged weights need no support of the engine.
    adapter_rank: int | None = None
    """Rank of the adapter that the engine applies in place of merged weights. A run with
    `refit.adapters=alone` sets it to that of the policy. None: the engine applies none."""
    # Routes take as much memory as the tokens many times over, and only one trainer reads them.
    return_routed_experts: bool = False
    """Whether samples have the experts that their tokens took, for a policy with
    `megatron_cfg.moe_router_replay`. Of models with experts, on a GPU."""
    # An hour: longer than a healthy batch, shorter than a night.
    generate_timeout_s: float = 3600.0
    """Limit of one call of `generate`, in seconds."""
    # As many wait as are sampled, so that no step of an engine runs short.
    max_requests_in_flight: int | None = None
    """Rows per engine that are submitted and not collected. None: twice `max_num_seqs`."""
    engine_kwargs: dict[str, object] = field(default_factory=dict)
    """Further arguments of vLLM's `LLM`, passed on unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(VllmSection):
    """How each engine runs: the section `vllm_cfg`, and keys from outside of it."""

    model_name: str
    """Name or directory of the model."""
    is_colocated: bool
    """Whether a trainer shares the devices, so that the engine has to sleep."""
    seed: int
    """Seed of vLLM's own random state."""


_PRECISIONS = ("float32", "bfloat16", "float16", "auto")
_POSITIVE_COUNTS = (
    "tensor_parallel_size",
    "max_num_seqs",
    "max_model_len",
    "kv_cache_memory_bytes",
    "max_requests_in_flight",
    "adapter_rank",
)
# Ranks that vLLM allocates memory for.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_LORA_KEYS = ("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_dtype")
# By default vLLM sizes the cache by the machine's memory, which other processes need as well.
_CPU_CACHE_BYTES = 1 << 30
# Keys of the section that are arguments of `LLM` by the same name.
_PASSED_ON = (
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "enforce_eager",
    "load_format",
    "trust_remote_code",
)
# The other arguments that `engine_arguments` sets, and the key that decides each.
_OWNERS = {
    "model": "generation.model_name",
    "tokenizer": "the policy's tokenizer",
    "dtype": "vllm_cfg.precision",
    "seed": "the argument seed",
    "logprobs_mode": "the contract: log-probabilities are those of the sampled distribution",
    "generation_config": "the keys of generation",
    "enable_sleep_mode": "generation.colocated.enabled",
    "weight_transfer_config": "vllm_cfg.weight_transfer",
    "enable_return_routed_experts": "vllm_cfg.return_routed_experts",
    "data_parallel_size": "the number of bundles",
    "distributed_executor_backend": "vllm_cfg.tensor_parallel_size",
} | {key.name: f"vllm_cfg.{key.name}" for key in fields(VllmSection)}


def generation_of_policy(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's section `generation`, completed by the policy's own values.

    Model, precision, longest row and `trust_remote_code` are the policy's unless the section has
    them.

    Args:
        policy: A resolved `PolicyConfig` that has the section.
    """
    generation = policy["generation"]
    inherited = {
        "precision": policy["precision"],
        "max_model_len": policy.get("max_total_sequence_length"),
        "trust_remote_code": policy["trust_remote_code"],
    }
    section = inherited | _without_none(generation.get("vllm_cfg") or {})
    return {"model_name": policy["model_name"], **generation, "vllm_cfg": section}


def complete_section(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return `vllm_cfg` of a `GenerationConfig` with the default of every key, unchecked."""
    return asdict(VllmSection()) | _without_none(generation.get("vllm_cfg") or {})


def parse_engine_config(
    config: Mapping[str, Any], *, seed: int, path: str = "generation"
) -> EngineConfig:
    """Return the engine's part of a `GenerationConfig`, validated and complete.

    Args:
        config: A `GenerationConfig`.
        seed: Seed of the engine's random state.
        path: Prefix of the keys in errors.

    Raises:
        ValueError: An unknown key, a wrong type, or a value out of range; names key and value.
    """
    check_typed_dict(config, GenerationConfig, path=path)
    if not config.get("model_name"):
        raise ValueError(f"{path}.model_name is not set: the name or directory of the model")
    path = f"{path}.vllm_cfg"
    given = config.get("vllm_cfg") or {}
    check_typed_dict(given, VllmSection, path=path)
    engine = EngineConfig(
        model_name=absolute_if_directory(config["model_name"]),
        is_colocated=(config.get("colocated") or {}).get("enabled", True),
        seed=seed,
        **_without_none(given),
    )
    _check_section(engine, path=path)
    return engine


def parse_sampling_config(
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    path: str = "generation",
) -> SamplingConfig:
    """Return the sampler's part of a `GenerationConfig`, validated, with its token ids.

    The model's end tokens end a row in addition to the configured ones.

    Args:
        config: A `GenerationConfig`.
        tokenizer: Its padding token, or else its end token, pads if the config names none.
        batch_size: Rows that an engine generates at a time.
        path: Prefix of the keys in errors.

    Raises:
        ValueError: A wrong type, a value out of range or no padding token; names key and value.
    """
    given = check_sampling(config, path=path)
    section = config.get("vllm_cfg") or {}
    ends = end_token_ids(
        config.get("model_name"),
        tokenizer,
        trust_remote_code=section.get("trust_remote_code", VllmSection().trust_remote_code),
    )
    sampling = SamplingConfig(
        max_new_tokens=given["max_new_tokens"],
        temperature=given["temperature"],
        top_p=given["top_p"],
        top_k=given.get("top_k"),
        stop_token_ids=tuple(sorted({*ends, *given.get("stop_token_ids", ())})),
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
    return resolve_generation_config(config, path=path)


def count_engines(ranks_per_node: Mapping[str, int], *, tensor_parallel_size: int) -> int:
    """Return the number of engines that fit on the bundles, each engine on one node.

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


def engine_arguments(
    config: EngineConfig,
    *,
    tokenizer: str,
    enable_sleep_mode: bool,
    is_cpu: bool,
    has_latent_attention: bool = False,
) -> dict[str, object]:
    """Return the arguments of vLLM's `LLM`.

    Args:
        config: How the engine runs.
        tokenizer: The tokenizer's directory.
        enable_sleep_mode: Whether vLLM can free the device's memory.
        is_cpu: Whether the device is the CPU.
        has_latent_attention: Whether the model has multi-head latent attention (DeepSeek).

    Raises:
        ValueError: Routes are asked for, which the device's vLLM does not return.
    """
    cache_bytes = config.kv_cache_memory_bytes
    if cache_bytes is None and is_cpu:
        cache_bytes = _CPU_CACHE_BYTES
    arguments: dict[str, object] = {key: getattr(config, key) for key in _PASSED_ON} | {
        "model": config.model_name,
        "tokenizer": tokenizer,
        "dtype": config.precision,
        "seed": config.seed,
        "distributed_executor_backend": "mp" if config.tensor_parallel_size > 1 else "uni",
        "kv_cache_memory_bytes": cache_bytes,
        "enable_sleep_mode": enable_sleep_mode,
        # Of the distribution that was sampled from; vLLM's default ignores the temperature.
        "logprobs_mode": "processed_logprobs",
        # Ignore the sampling defaults that come with a model: the config has them all.
        "generation_config": "vllm",
    }
    if is_cpu:
        # A prompt whose prefill is divided over steps takes its seeded generator back by a draw,
        # which torch's generators on the CPU cannot: vLLM 0.32 ends with an error.
        arguments["enable_chunked_prefill"] = False
        if has_latent_attention and config.precision == "float32":
            # Where the CPU has AMX, vLLM would choose a kernel for it, which takes no float32.
            arguments["attention_backend"] = "CPU_MLA"
    if config.return_routed_experts:
        if is_cpu:
            raise ValueError(
                "generation.vllm_cfg.return_routed_experts=True: vLLM returns routes on a GPU only"
            )
        arguments["enable_return_routed_experts"] = True
    if config.weight_transfer:
        arguments["weight_transfer_config"] = {"backend": "rl_refit"}
    if config.adapter_rank is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": min(rank for rank in _LORA_RANKS if rank >= config.adapter_rank),
            # All requests have the same adapter.
            "max_loras": 1,
        }
    return arguments | config.engine_kwargs


def _check_counts(section: VllmSection, *, path: str) -> None:
    for key in _POSITIVE_COUNTS:
        count = getattr(section, key)
        if count is not None and count < 1:
            raise ValueError(f"{path}.{key}={count} must be at least 1")
    if section.pipeline_parallel_size != 1:
        raise ValueError(
            f"{path}.pipeline_parallel_size={section.pipeline_parallel_size} must be 1: an engine "
            f"is tensor parallel alone, see {path}.tensor_parallel_size"
        )


def _check_section(section: VllmSection, *, path: str) -> None:
    _check_counts(section, path=path)
    if not 0 < section.gpu_memory_utilization <= 1:
        value = section.gpu_memory_utilization
        raise ValueError(f"{path}.gpu_memory_utilization={value} must lie in (0, 1]")
    if section.precision not in _PRECISIONS:
        raise ValueError(f"{path}.precision={section.precision!r} must be one of {_PRECISIONS}")
    if section.sleep_level not in (1, 2):
        raise ValueError(f"{path}.sleep_level={section.sleep_level} must be 1 or 2")
    if not 0 < section.generate_timeout_s < math.inf:
        value = section.generate_timeout_s
        raise ValueError(f"{path}.generate_timeout_s={value} must be positive and finite")
    if section.adapter_rank is not None:
        _check_adapters(section, section.adapter_rank, path=path)
    for key in section.engine_kwargs:
        if key in _OWNERS:
            raise ValueError(f"{path}.engine_kwargs.{key} is already set by {_OWNERS[key]}")


def _check_adapters(section: VllmSection, rank: int, *, path: str) -> None:
    if rank > _LORA_RANKS[-1]:
        raise ValueError(f"{path}.adapter_rank={rank}: vLLM takes at most {_LORA_RANKS[-1]}")
    if not section.weight_transfer:
        raise ValueError(
            f"{path}.adapter_rank={rank} contradicts {path}.weight_transfer=False: adapters come "
            "by a refit"
        )
    for key in _LORA_KEYS:
        if key in section.engine_kwargs:
            raise ValueError(
                f"{path}.engine_kwargs.{key} contradicts {path}.adapter_rank={rank}, with which "
                "the engine applies one adapter, the policy's"
            )


def _without_none(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that are set: None means "not set"."""
    return {key: value for key, value in section.items() if value is not None}
