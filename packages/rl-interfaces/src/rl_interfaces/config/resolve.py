"""Resolution of a user's policy config: validation, defaults and consistency of related keys."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import cast

from rl_interfaces.config.schema import as_mapping, check_ranges, check_typed_dict
from rl_interfaces.config.types import PolicyConfig, ResolvedConfig
from rl_interfaces.generation import ColocationResources, GenerationConfig

POLICY_DEFAULTS: ResolvedConfig = {
    # The policy itself; the other heads are for reward and value models.
    "head": "language_model",
    # Small enough to start on any machine; the throughput of both is the user's to tune.
    "train_global_batch_size": 32,
    "train_micro_batch_size": 4,
    "logprob_batch_size": 4,
    "generation_batch_size": 32,
    # Fastest on current accelerators. Master weights stay float32.
    "precision": "bfloat16",
    # No padding beyond what the layout asks for.
    "make_sequence_length_divisible_by": 1,
    # `name` is then the model's own.
    "tokenizer": {},
    # Both trade speed for memory, which is for the user to ask for.
    "fsdp_offload_enabled": False,
    "activation_checkpointing_enabled": False,
    # Fixed, so that two runs of one config are identical.
    "seed": 0,
    # Code in a checkpoint is untrusted.
    "trust_remote_code": False,
    # Longer than any collective of a healthy job, shorter than a night.
    "timeout_s": 600.0,
    # Under the working directory of the worker.
    "profile_dir": "profiles",
    # No backend is enabled by default. All ranks of an enabled one are data-parallel.
    "dtensor_cfg": {
        "enabled": False,
        "cpu_offload": False,
        "sequence_parallel": False,
        "activation_checkpointing": False,
        "tensor_parallel_size": 1,
        "context_parallel_size": 1,
        # Without dropout, training scores tokens as the sampler did.
        "model_dropout": False,
        # Sums are rounded in another order, and the attention has to be torch's.
        "share_prefixes": False,
        # An extra brings it, and its kernels have been measured nowhere.
        "fused_head": False,
        # Holds a second copy of weights and optimizer state in host memory while it writes.
        "async_checkpoint": False,
        # Sharded over all data-parallel ranks, which takes the least memory.
        "data_parallel_replicate_size": 1,
        "lora": {
            "enabled": False,
            # Enough for policy-gradient updates, at a few percent of the model's parameters.
            "r": 16,
            # Twice the rank: the scale that most published learning rates were tuned for.
            "lora_alpha": 32,
            # Without dropout, training scores tokens as the sampler did.
            "lora_dropout": 0.0,
            # Adapters on attention layers only learn less than adapters on all layers.
            "target_modules": "all-linear",
        },
    },
    "megatron_cfg": {
        "enabled": False,
        "empty_unused_memory_level": 0,
        "activation_checkpointing": False,
        "converter_type": "auto",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "expert_model_parallel_size": 1,
        # Takes the least memory, and the most time.
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        # Load balancing adds an auxiliary loss to the policy's: opt-in.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # The only one that supports variable sequence lengths across pipeline stages.
        "moe_token_dispatcher_type": "alltoall",
        # The routes of a batch take memory, and dense models have none.
        "moe_router_replay": False,
        # All of the model is trained.
        "freeze_moe_router": False,
        # Less memory traffic, to the same values.
        "apply_rope_fusion": True,
    },
    # Micro-batches of a fixed number of rows, unless a token budget is given.
    "dynamic_batching": {"enabled": False, "sequence_length_round": 64},
    # Packs as tightly as plain first-fit-decreasing, in less time on many sequences.
    "sequence_packing": {
        "enabled": False,
        "algorithm": "modified_first_fit_decreasing",
        # No padding but what the layout needs.
        "sequence_length_round": 1,
    },
}
"""Every default of a policy, in one place. A key that is not here has none."""

GENERATION_DEFAULTS: ResolvedConfig = {
    # Needs only the training worker.
    "backend": "hf",
    # Enough to read a completion, short enough for a first run.
    "max_new_tokens": 128,
    # The model's own distribution, which is what a policy gradient is defined on.
    "temperature": 1.0,
    "top_p": 1.0,
}
"""The defaults of the section `generation`, where there is one."""

MEGATRON_DEFAULTS: dict[str, ResolvedConfig] = {
    "optimizer": {
        # Megatron-core's own, but for the decay: a policy is fine-tuned.
        "optimizer": "adam",
        "min_lr": 0.0,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1.0e-8,
        "sgd_momentum": 0.9,
        # Both trade something for memory, which is for the user to ask for.
        "use_distributed_optimizer": False,
        "use_precision_aware_optimizer": False,
    },
    "scheduler": {
        # Learning rate and weight decay stay constant.
        "lr_decay_style": "constant",
        "lr_warmup_iters": 0,
        "lr_warmup_init": 0.0,
        "weight_decay_incr_style": "constant",
    },
    "distributed_data_parallel_config": {
        # Sums over many ranks lose precision in 16 bits.
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        # Gradients are sums here: losses are divided by a global count.
        "average_in_collective": False,
        "use_custom_fsdp": False,
    },
}
"""The defaults of the sections of `megatron_cfg`: of the first two where they are there."""

_HEADS = ("language_model", "reward", "value")
_PRECISIONS = ("float32", "bfloat16", "float16")
# A key of the policy, and the key of a backend's section that means the same.
_TWINS = (
    ("fsdp_offload_enabled", "dtensor_cfg", "cpu_offload"),
    ("activation_checkpointing_enabled", "dtensor_cfg", "activation_checkpointing"),
    ("activation_checkpointing_enabled", "megatron_cfg", "activation_checkpointing"),
)
# What torchrun sets, or Ray's workers, and what torch reads when it is imported.
_TOO_LATE = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
    }
)
# Passed through to libraries for which None may differ from a missing key.
_FREE_FORM = ("kwargs", "vllm_cfg")


def resolve_policy_config(config: Mapping[str, object], *, path: str = "policy") -> ResolvedConfig:
    """Return a validated copy of `config` with defaults filled in and unset keys left out.

    Sections that are not enabled are checked for unknown keys and types only. An undocumented
    section `<name>_cfg` with a key `enabled` belongs to a third-party backend and is passed through
    unchanged. Idempotent.

    Args:
        config: A `PolicyConfig`; keys may be missing.
        path: Prefix of the keys in error messages.

    Raises:
        ValueError: An unknown key, a wrong type, a value out of range, or two keys that
            contradict each other. The message names keys and values.
    """
    third_party = _third_party_sections(as_mapping(config, path=path))
    documented = {key: config[key] for key in config if key not in third_party}
    check_typed_dict(documented, PolicyConfig, path=path)
    given = _without_none(documented)
    if "model_name" not in given:
        raise ValueError(f"{path}.model_name is not set: the name or directory of the model")
    _check_one_backend(given | third_party, path=path)
    _reconcile_twins(given, path=path)
    _reconcile_learning_rates(given, path=path)
    resolved = merge_sections(POLICY_DEFAULTS, given)
    resolved["tokenizer"].setdefault("name", resolved["model_name"])
    _complete_megatron(resolved["megatron_cfg"])
    _check_values(resolved, path=path)
    if "generation" in given:
        resolved["generation"] = resolve_generation_config(
            given["generation"], path=f"{path}.generation"
        )
    return resolved | third_party


def resolve_generation_config(
    config: Mapping[str, object], *, path: str = "policy.generation"
) -> ResolvedConfig:
    """Return a validated copy of a `GenerationConfig` with its defaults, see above.

    Raises:
        ValueError: An unknown key, a wrong type, a value out of range, or two keys that contradict
            each other. The message names keys and values.
    """
    check_typed_dict(config, GenerationConfig, path=path)
    generation = merge_sections(GENERATION_DEFAULTS, _without_none(config))
    check_ranges(generation, GenerationConfig, path=path)
    colocated = generation.get("colocated", {})
    # Read just where `enabled` is false.
    resources = colocated.get("resources", {})
    check_ranges(resources, ColocationResources, path=f"{path}.colocated.resources")
    if generation["backend"] == "hf" and colocated.get("enabled") is False:
        raise ValueError(
            f"{path}.colocated.enabled=False contradicts {path}.backend='hf': "
            "the training workers sample there"
        )
    return generation


def merge_sections(base: Mapping[str, object], given: Mapping[str, object]) -> ResolvedConfig:
    """Return a deep copy of `base` updated with `given`; nested mappings are merged recursively."""
    merged: ResolvedConfig = copy.deepcopy(dict(base))
    for key, value in given.items():
        below = merged.get(key)
        merged[key] = (
            merge_sections(cast("ResolvedConfig", below), cast("ResolvedConfig", value))
            if isinstance(below, Mapping) and isinstance(value, Mapping)
            else copy.deepcopy(given[key])
        )
    return merged


def _third_party_sections(config: Mapping[str, object]) -> ResolvedConfig:
    """Return copies of the sections of third-party backends."""
    return {
        key: copy.deepcopy(config[key])
        for key, value in config.items()
        if str(key).endswith("_cfg")
        and key not in PolicyConfig.__annotations__
        and isinstance(value, Mapping)
        and isinstance(cast("Mapping[str, object]", value).get("enabled"), bool)
    }


def _without_none(section: Mapping[str, object]) -> ResolvedConfig:
    """Return a deep copy without the keys whose value is None; free-form sections keep theirs."""

    def copied(value: object) -> object:
        if isinstance(value, list):
            return [copied(entry) for entry in cast("list[object]", value)]
        if isinstance(value, Mapping):
            return _without_none(cast("ResolvedConfig", value))
        return copy.deepcopy(value)

    return {
        key: copy.deepcopy(value) if key in _FREE_FORM else copied(value)
        for key, value in section.items()
        if value is not None
    }


def _complete_megatron(section: ResolvedConfig) -> None:
    """Fill in the defaults of the sections of an enabled `megatron_cfg`."""
    if not section["enabled"]:
        return
    section.setdefault("distributed_data_parallel_config", {})
    for name, defaults in MEGATRON_DEFAULTS.items():
        if name in section:
            section[name] = merge_sections(defaults, section[name])


def _check_one_backend(given: ResolvedConfig, *, path: str) -> None:
    sections = [key for key in given if key.endswith("_cfg") and given[key].get("enabled")]
    if len(sections) > 1:
        both = " and ".join(f"{path}.{key}.enabled=True" for key in sections)
        raise ValueError(f"{both}: enable one backend")


def _reconcile_twins(given: ResolvedConfig, *, path: str) -> None:
    """Copy the value of one of two equivalent keys to the other; raise if they differ."""
    for key, section_name, inner in _TWINS:
        section = given.get(section_name, {})
        if not section.get("enabled"):
            continue
        values = [part[name] for part, name in ((section, inner), (given, key)) if name in part]
        # Files say False for what an older backend had, and True for the one that they use.
        if values == [False, True]:
            raise ValueError(
                f"{path}.{key}={given[key]} contradicts "
                f"{path}.{section_name}.{inner}={section[inner]}"
            )
        if values:
            given[key] = section[inner] = values[0]


def _reconcile_learning_rates(given: ResolvedConfig, *, path: str) -> None:
    """Set each optimizer's missing `lr` to `learning_rate`; raise if they differ."""
    if "learning_rate" not in given:
        return
    rate = given["learning_rate"]
    for optimizer_path, arguments in _optimizer_arguments(given):
        if arguments.get("lr") is None:
            arguments["lr"] = rate
        elif arguments["lr"] != rate:
            raise ValueError(
                f"{path}.learning_rate={rate} contradicts "
                f"{path}.{optimizer_path}.lr={arguments['lr']}"
            )


def _optimizer_arguments(given: ResolvedConfig) -> Iterator[tuple[str, ResolvedConfig]]:
    if "optimizer" in given:
        yield "optimizer.kwargs", given["optimizer"].setdefault("kwargs", {})
    megatron = given.get("megatron_cfg", {})
    if megatron.get("enabled") and "optimizer" in megatron:
        yield "megatron_cfg.optimizer", megatron["optimizer"]


def _check_values(config: ResolvedConfig, *, path: str) -> None:
    check_ranges(config, PolicyConfig, path=path)
    for key, choices in (("precision", _PRECISIONS), ("head", _HEADS)):
        if config[key] not in choices:
            raise ValueError(f"{path}.{key}={config[key]!r} must be one of {choices}")
    if config["dynamic_batching"]["enabled"] and config["sequence_packing"]["enabled"]:
        raise ValueError(
            f"{path}.dynamic_batching.enabled=True contradicts "
            f"{path}.sequence_packing.enabled=True: a micro-batch is either padded or packed"
        )
    for name in ("dynamic_batching", "sequence_packing"):
        _check_budgets(config[name], path=f"{path}.{name}")
    for name in ("dtensor_cfg", "megatron_cfg"):
        if config[name]["enabled"]:
            _check_variables(config[name].get("env_vars", {}), path=f"{path}.{name}.env_vars")


def _check_variables(variables: Mapping[str, str], *, path: str) -> None:
    for name, value in variables.items():
        if name in _TOO_LATE:
            raise ValueError(
                f"{path}.{name}={value!r}: a rank's process has read it when the config arrives; "
                "set it in the environment of the run"
            )
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{path}.{name}={value!r} cannot be an environment variable")


def _check_budgets(section: ResolvedConfig, *, path: str) -> None:
    if not section["enabled"]:
        return
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        if key not in section:
            raise ValueError(f"{path}.{key} is not set: the tokens of a micro-batch")
