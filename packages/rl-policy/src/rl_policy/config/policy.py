"""The section `policy` of a run's configuration: merging it and completing it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from rl_interfaces import resolve_policy_config

BUILTIN_MODEL = "builtin"
"""Stands for the name of the model that a run builds, until it is built."""


def merge_policy(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` over `base`, section by section.

    Two things of `base` do not survive: the keyword arguments of another optimizer, and its choice
    of backend where `given` enables one.
    """
    kept = copy.deepcopy(dict(base))
    if _optimizer_name(given) not in (None, _optimizer_name(kept)):
        kept.pop("optimizer", None)
    if any(_is_enabled(key, value) for key, value in given.items()):
        kept = {
            key: {**value, "enabled": False} if _is_enabled(key, value) else value
            for key, value in kept.items()
        }
    return merge_sections(kept, given)


def merge_sections(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` over `base`; where both are mappings they are merged in turn."""
    merged = copy.deepcopy(dict(base))
    for key, value in given.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_sections(merged[key], value) if both else copy.deepcopy(value)
    return merged


def resolve_policy(policy: Mapping[str, Any], *, path: str = "policy") -> dict[str, Any]:
    """Return the complete section; a model that is not named is the one the run builds.

    Raises:
        ValueError: As `rl_interfaces.resolve_policy_config`, or checkpoints are to be written in
            the background, while a run takes each for whole when the call returns.
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


def _optimizer_name(policy: Mapping[str, Any]) -> Any:
    optimizer = policy.get("optimizer")
    return optimizer.get("name") if isinstance(optimizer, Mapping) else None


def _is_enabled(key: str, value: Any) -> bool:
    return key.endswith("_cfg") and isinstance(value, Mapping) and bool(value.get("enabled"))
