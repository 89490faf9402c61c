"""The policy config, parsed and validated once into the engine's typed settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rl_interfaces import resolve_policy_config
from rl_interfaces.backend.generation import SamplingConfig
from transformers import AutoConfig, GenerationConfig

from rl_megatron_worker.model.config import ModelOptions
from rl_megatron_worker.optimizer_config import (
    OptimizerSettings,
    SchedulerSettings,
    parse_optimizer,
    parse_scheduler,
)
from rl_megatron_worker.parallel.groups import MegatronLayout, plan_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PATH = "policy.megatron_cfg"
_MOE_OPTIONS = (
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_token_dispatcher_type",
)
_BALANCING_TYPES = ("none", "aux_loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallelSettings:
    """Settings of the gradient reduction over data-parallel ranks."""

    grad_reduce_in_fp32: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """All settings that the engine reads from the policy config.

    The worker reads its own, see `rl_interfaces.backend.worker.WorkerSettings`.
    """

    model_name: str
    converter_type: str
    layout: MegatronLayout
    model: ModelOptions
    sequence_multiple: int
    """Each sequence is padded internally to a multiple of this many tokens."""
    optimizer: OptimizerSettings | None
    scheduler: SchedulerSettings
    data_parallel: DataParallelSettings
    empty_unused_memory_level: int
    trust_remote_code: bool
    timeout_s: float
    seed: int
    temperature: float
    """Divides the logits of every log-probability; 1.0 if generation is greedy or not set."""

    @classmethod
    def from_policy_config(
        cls, config: Mapping[str, Any], *, world_size: int, init_optimizer: bool
    ) -> EngineConfig:
        """Parse and check `config`.

        Raises:
            ValueError: A setting is invalid; the message names key and numbers.
        """
        resolved = resolve_policy_config(config)
        section = resolved["megatron_cfg"]
        layout = plan_layout(section, world_size=world_size)
        _check_policy(resolved, data_parallel=layout.data)
        optimizer = parse_optimizer(resolved) if init_optimizer else None
        sampling = SamplingConfig.from_policy_config(resolved)
        return cls(
            model_name=resolved["model_name"],
            converter_type=section["converter_type"],
            layout=layout,
            model=_parse_model(section, precision=resolved["precision"]),
            sequence_multiple=math.lcm(
                layout.token_multiple, resolved["make_sequence_length_divisible_by"]
            ),
            optimizer=optimizer,
            scheduler=parse_scheduler(resolved, optimizer),
            data_parallel=_parse_data_parallel(section, optimizer),
            empty_unused_memory_level=_memory_level(section),
            trust_remote_code=resolved["trust_remote_code"],
            timeout_s=resolved["timeout_s"],
            seed=resolved["seed"],
            temperature=(sampling.temperature if sampling else 0.0) or 1.0,
        )


def load_model_config(config: EngineConfig) -> Any:
    """Return the model's transformers config.

    Raises:
        ValueError: The model cannot be found or read.
    """
    try:
        return AutoConfig.from_pretrained(
            config.model_name, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"policy.model_name={config.model_name!r} cannot be loaded: {error}"
        ) from error


def load_generation_config(config: EngineConfig) -> GenerationConfig | None:
    """Return the generation config of the model's checkpoint; None if it has none."""
    try:
        return GenerationConfig.from_pretrained(config.model_name)
    except OSError:  # The checkpoint has no generation_config.json.
        return None


def _check_policy(resolved: Mapping[str, Any], *, data_parallel: int) -> None:
    global_size = resolved["train_global_batch_size"]
    if global_size % data_parallel:
        raise ValueError(
            f"policy.train_global_batch_size={global_size} is not divisible by the "
            f"{data_parallel} data-parallel ranks"
        )
    if resolved["head"] != "language_model":
        raise ValueError(
            f"policy.head={resolved['head']!r} needs another backend: Megatron-core supports "
            "language models only"
        )
    if resolved["fsdp_offload_enabled"]:
        raise ValueError(
            f"policy.fsdp_offload_enabled=True needs FSDP, and {_PATH}.enabled=True has none"
        )


def _parse_model(section: Mapping[str, Any], *, precision: str) -> ModelOptions:
    pipeline_dtype = section.get("pipeline_dtype", precision)
    if pipeline_dtype != precision:
        raise ValueError(
            f"{_PATH}.pipeline_dtype={pipeline_dtype!r} contradicts policy.precision="
            f"{precision!r}: stages exchange activations in the compute dtype"
        )
    recomputed: dict[str, Any] = {}
    if section["activation_checkpointing"]:
        recomputed = _parse_recomputation(section)
    return ModelOptions(
        params_dtype=_DTYPES[precision],
        pipeline_dtype=_DTYPES[pipeline_dtype],
        moe_options=_parse_experts(section),
        **recomputed,
    )


def _parse_experts(section: Mapping[str, Any]) -> dict[str, Any]:
    kind, weight = section["moe_router_load_balancing_type"], section["moe_aux_loss_coeff"]
    key = f"{_PATH}.moe_router_load_balancing_type"
    if kind == "seq_aux_loss":
        raise ValueError(
            f"{key}='seq_aux_loss' is per sequence, but each micro-batch is packed into one: "
            "set 'aux_loss', which is per micro-batch"
        )
    if kind == "sinkhorn":
        raise ValueError(
            f"{key}='sinkhorn' routes tokens to other experts in training than in scoring, and "
            "weights them differently from the model: set 'aux_loss' or 'none'"
        )
    if kind not in _BALANCING_TYPES:
        raise ValueError(f"{key}={kind!r} must be one of {_BALANCING_TYPES}")
    if not weight >= 0:
        raise ValueError(f"{_PATH}.moe_aux_loss_coeff={weight} must not be negative")
    if weight and kind != "aux_loss":
        raise ValueError(
            f"{_PATH}.moe_aux_loss_coeff={weight} needs {key}='aux_loss', got {kind!r}"
        )
    return {name: section[name] for name in _MOE_OPTIONS}


def _parse_recomputation(section: Mapping[str, Any]) -> dict[str, Any]:
    granularity, method = section["recompute_granularity"], section["recompute_method"]
    for key, value, choices in (
        ("recompute_granularity", granularity, ("full", "selective")),
        ("recompute_method", method, ("uniform", "block")),
    ):
        if value not in choices:
            raise ValueError(f"{_PATH}.{key}={value!r} must be one of {choices}")
    if granularity == "selective":
        return {"recompute_granularity": granularity}
    num_layers = section["recompute_num_layers"]
    if num_layers < 1:
        raise ValueError(f"{_PATH}.recompute_num_layers={num_layers} must be at least 1")
    return {
        "recompute_granularity": granularity,
        "recompute_method": method,
        "recompute_num_layers": num_layers,
    }


def _parse_data_parallel(
    section: Mapping[str, Any], optimizer: OptimizerSettings | None
) -> DataParallelSettings:
    given = section["distributed_data_parallel_config"]
    path = f"{_PATH}.distributed_data_parallel_config"
    if given["average_in_collective"]:
        raise ValueError(
            f"{path}.average_in_collective=True contradicts the loss normalisation: gradients are "
            "summed over the ranks"
        )
    if given["use_custom_fsdp"]:
        raise ValueError(
            f"{path}.use_custom_fsdp=True: this worker does not run Megatron's own FSDP; "
            "policy.dtensor_cfg is FSDP2"
        )
    if "data_parallel_sharding_strategy" in given:
        raise ValueError(
            f"{path}.data_parallel_sharding_strategy="
            f"{given['data_parallel_sharding_strategy']!r} needs {path}.use_custom_fsdp=True"
        )
    if (
        given["overlap_param_gather"]
        and optimizer is not None
        and not (optimizer.is_distributed and given["overlap_grad_reduce"])
    ):
        raise ValueError(
            f"{path}.overlap_param_gather=True needs {path}.overlap_grad_reduce=True and "
            f"{_PATH}.optimizer.use_distributed_optimizer=True"
        )
    return DataParallelSettings(
        grad_reduce_in_fp32=given["grad_reduce_in_fp32"],
        overlap_grad_reduce=given["overlap_grad_reduce"],
        overlap_param_gather=given["overlap_param_gather"],
    )


def _memory_level(section: Mapping[str, Any]) -> int:
    level = section["empty_unused_memory_level"]
    if level not in (0, 1, 2):
        raise ValueError(f"{_PATH}.empty_unused_memory_level={level} must be 0, 1 or 2")
    return level
