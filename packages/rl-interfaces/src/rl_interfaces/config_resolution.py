"""From the dict that a user wrote to one that is complete, typed and free of contradictions."""

from __future__ import annotations

import copy
import difflib
import types
from collections.abc import Mapping
from typing import Any, NotRequired, Required, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

from rl_interfaces.config import PolicyConfig

POLICY_DEFAULTS: dict[str, Any] = {
    # Small enough to start on any machine; the throughput of both is the user's to tune.
    "train_global_batch_size": 32,
    "train_micro_batch_size": 4,
    "logprob_batch_size": 4,
    "generation_batch_size": 32,
    # What current accelerators are fastest in. Master weights stay float32.
    "precision": "bfloat16",
    "make_sequence_length_divisible_by": 1,
    "tokenizer": {},
    "fsdp_offload_enabled": False,
    "activation_checkpointing_enabled": False,
    "seed": 0,
    # A checkpoint's code is a stranger's code.
    "trust_remote_code": False,
    # Longer than any collective of a healthy job, shorter than a night.
    "timeout_s": 600.0,
    "profile_dir": "profiles",
    "dtensor_cfg": {
        "enabled": False,
        "cpu_offload": False,
        "sequence_parallel": False,
        "activation_checkpointing": False,
        "tensor_parallel_size": 1,
        "context_parallel_size": 1,
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
    },
    "dynamic_batching": {"enabled": False, "sequence_length_round": 64},
    "sequence_packing": {"enabled": False, "algorithm": "modified_first_fit_decreasing"},
}
"""Every default of a policy, in one place. A key that is not here has none."""

GENERATION_DEFAULTS: dict[str, Any] = {
    "backend": "hf",
    "max_new_tokens": 128,
    # The model's own distribution, which is what a policy gradient is defined on.
    "temperature": 1.0,
    "top_p": 1.0,
}
"""The defaults of the section `generation`, where there is one."""

_POSITIVE = (
    "train_global_batch_size",
    "train_micro_batch_size",
    "logprob_batch_size",
    "generation_batch_size",
    "make_sequence_length_divisible_by",
    "max_total_sequence_length",
    "timeout_s",
)
_PRECISIONS = ("float32", "bfloat16", "float16")


def resolve_policy_config(config: Mapping[str, Any], *, path: str = "policy") -> dict[str, Any]:
    """Return a complete copy of `config`: checked, defaults filled in, what is not set left out.

    Sections that are not enabled are checked for unknown keys and types alone. A section
    `<name>_cfg` that is not documented belongs to a third party's backend and is passed on.

    Args:
        config: A `PolicyConfig`, as far as the user gave it.
        path: How the errors name the config.

    Raises:
        ValueError: An unknown key, a wrong type, a value out of range, or two keys that say
            different things about one matter. The message names keys and values.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{path} must be a mapping, got {type(config).__name__}")
    third_party = {
        key: copy.deepcopy(dict(value))
        for key, value in config.items()
        if key.endswith("_cfg")
        and key not in PolicyConfig.__annotations__
        and isinstance(value, Mapping)
    }
    given = _without_none({key: config[key] for key in config if key not in third_party})
    check_typed_dict(given, PolicyConfig, path=path)
    if "model_name" not in given:
        raise ValueError(f"{path}.model_name is not set: the name or directory of the model")
    given = _reconcile_twins(given, path=path)
    resolved = _merge(POLICY_DEFAULTS, given)
    resolved["tokenizer"].setdefault("name", resolved["model_name"])
    if "generation" in given:
        resolved["generation"] = _merge(GENERATION_DEFAULTS, given["generation"])
        _check_generation(resolved["generation"], path=f"{path}.generation")
    resolved.update(third_party)
    _check_values(resolved, path=path)
    return resolved


def check_typed_dict(value: Any, typed_dict: type, *, path: str) -> None:
    """Raise `ValueError` unless `value` has only keys of `typed_dict`, with values of its types.

    Keys may be missing. An int stands for a float; nothing else is converted.

    Args:
        value: What the user gave.
        typed_dict: The TypedDict class to hold it against.
        path: How the errors name the value.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} must be a mapping, got {_describe(value)}")
    hints = get_type_hints(typed_dict, include_extras=True)
    for key, entry in value.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            hint = f", did you mean {near[0]!r}?" if near else f", the keys are {sorted(hints)}"
            raise ValueError(f"{path}.{key} is not a known key{hint}")
        _check_type(entry, hints[key], path=f"{path}.{key}")


def _check_type(value: Any, expected: Any, *, path: str) -> None:
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (NotRequired, Required):
        _check_type(value, arguments[0], path=path)
    elif origin in (Union, types.UnionType):
        _check_union(value, arguments, path=path)
    elif is_typeddict(expected):
        check_typed_dict(value, expected, path=path)
    elif origin is list:
        _check_list(value, arguments[0], path=path)
    elif origin is dict:
        _check_dict(value, arguments[1], path=path)
    elif not _is_scalar(value, expected):
        raise ValueError(f"{path} must be {_type_name(expected)}, got {_describe(value)}")


def _check_list(value: Any, expected: Any, *, path: str) -> None:
    if not isinstance(value, list):
        raise ValueError(f"{path} must be a list, got {_describe(value)}")
    for index, entry in enumerate(cast("list[Any]", value)):
        _check_type(entry, expected, path=f"{path}[{index}]")


def _check_dict(value: Any, expected: Any, *, path: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} must be a mapping, got {_describe(value)}")
    for key, entry in cast("Mapping[str, Any]", value).items():
        _check_type(entry, expected, path=f"{path}.{key}")


def _check_union(value: Any, members: tuple[Any, ...], *, path: str) -> None:
    errors: list[ValueError] = []
    for member in members:
        try:
            _check_type(value, member, path=path)
        except ValueError as error:
            errors.append(error)
        else:
            return
    structured = [m for m in members if m is not type(None) and _matches_container(value, m)]
    if len(structured) == 1:  # the value is plainly meant as this member: its own error says more
        raise errors[members.index(structured[0])]
    names = " or ".join(_type_name(member) for member in members)
    raise ValueError(f"{path} must be {names}, got {_describe(value)}")


def _matches_container(value: Any, member: Any) -> bool:
    if isinstance(value, Mapping):
        return is_typeddict(member)
    return isinstance(value, list) and get_origin(member) is list


def _is_scalar(value: Any, expected: Any) -> bool:
    if expected is Any:
        return True
    if expected is type(None):
        return value is None
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, expected)


def _type_name(expected: Any) -> str:
    if expected is type(None):
        return "None"
    return str(getattr(expected, "__name__", expected))


def _describe(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


def _without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy without the keys whose value is None; kwargs dicts keep theirs."""
    out: dict[str, Any] = {}
    for key, entry in value.items():
        if entry is None:
            continue
        is_section = isinstance(entry, Mapping) and key != "kwargs"
        out[key] = _without_none(entry) if is_section else copy.deepcopy(entry)
    return out


def _merge(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` over `defaults`; mappings that stand in both are merged in turn."""
    out = copy.deepcopy(dict(defaults))
    for key, entry in given.items():
        both = isinstance(entry, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merge(out[key], entry) if both else copy.deepcopy(entry)
    return out


def _reconcile_twins(given: dict[str, Any], *, path: str) -> dict[str, Any]:
    """Give keys that mean the same thing the same value, or refuse them by name."""
    twins = [
        ("fsdp_offload_enabled", "dtensor_cfg", "cpu_offload"),
        ("activation_checkpointing_enabled", "dtensor_cfg", "activation_checkpointing"),
        ("activation_checkpointing_enabled", "megatron_cfg", "activation_checkpointing"),
    ]
    out = copy.deepcopy(given)
    for key, section, inner in twins:
        if not given.get(section, {}).get("enabled") or key not in given:
            continue
        value, inner_value = given[key], given[section].get(inner, given[key])
        if value != inner_value:
            raise ValueError(
                f"{path}.{key}={value} contradicts {path}.{section}.{inner}={inner_value}"
            )
        out[section][inner] = value
    return _reconcile_learning_rate(out, path=path)


def _reconcile_learning_rate(given: dict[str, Any], *, path: str) -> dict[str, Any]:
    if "learning_rate" not in given or "optimizer" not in given:
        return given
    kwargs = given["optimizer"].setdefault("kwargs", {})
    rate = kwargs.setdefault("lr", given["learning_rate"])
    if rate != given["learning_rate"]:
        raise ValueError(
            f"{path}.learning_rate={given['learning_rate']} contradicts "
            f"{path}.optimizer.kwargs.lr={rate}"
        )
    return given


def _check_values(config: Mapping[str, Any], *, path: str) -> None:
    for key in _POSITIVE:
        if key in config and config[key] <= 0:
            raise ValueError(f"{path}.{key}={config[key]} must be positive")
    if config["precision"] not in _PRECISIONS:
        raise ValueError(f"{path}.precision={config['precision']!r} must be one of {_PRECISIONS}")
    if "max_grad_norm" in config and config["max_grad_norm"] < 0:
        raise ValueError(f"{path}.max_grad_norm={config['max_grad_norm']} must not be negative")
    if config["dynamic_batching"]["enabled"] and config["sequence_packing"]["enabled"]:
        raise ValueError(
            f"{path}.dynamic_batching.enabled=True contradicts "
            f"{path}.sequence_packing.enabled=True: a micro-batch is either padded or packed"
        )
    for section in ("dynamic_batching", "sequence_packing"):
        _check_budgets(config[section], path=f"{path}.{section}")
    enabled = [
        key
        for key, value in config.items()
        if key.endswith("_cfg") and isinstance(value, Mapping) and value.get("enabled")
    ]
    if len(enabled) > 1:
        both = " and ".join(f"{path}.{key}.enabled=True" for key in enabled)
        raise ValueError(f"{both}: enable one backend")


def _check_budgets(section: Mapping[str, Any], *, path: str) -> None:
    if not section["enabled"]:
        return
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        if key not in section:
            raise ValueError(f"{path}.{key} is not set: the tokens of a micro-batch")
        if section[key] <= 0:
            raise ValueError(f"{path}.{key}={section[key]} must be positive")
    rounding = section.get("sequence_length_round", 1)
    if rounding <= 0:
        raise ValueError(f"{path}.sequence_length_round={rounding} must be positive")


def _check_generation(generation: Mapping[str, Any], *, path: str) -> None:
    if generation["max_new_tokens"] <= 0:
        raise ValueError(f"{path}.max_new_tokens={generation['max_new_tokens']} must be positive")
    if generation["temperature"] < 0:
        raise ValueError(f"{path}.temperature={generation['temperature']} must not be negative")
    if not 0 < generation["top_p"] <= 1:
        raise ValueError(f"{path}.top_p={generation['top_p']} must lie in (0, 1]")
    if "top_k" in generation and generation["top_k"] <= 0:
        raise ValueError(f"{path}.top_k={generation['top_k']} must be positive, None keeps all")
