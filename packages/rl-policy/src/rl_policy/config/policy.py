"""The section `policy`: its defaults over those of `rl_interfaces`, and how layers are merged."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from rl_interfaces import resolve_policy_config
from rl_interfaces.config.resolve import merge_sections

Settings: TypeAlias = dict[str, Any]
"""Nested settings as in YAML. No TypedDict has all their keys, as a third party's backend has a
section of its own."""

BUILTIN_MODEL = "builtin"
"""The value of `policy.model_name` for the model that a run builds."""

_MODEL_KEY = re.compile(r"(?<![\w.])policy\.model_name\b")
_SECTION = re.compile(r"(?<![\w.])policy\.(?=\w)")

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


@contextmanager
def naming_section(path: str, *, model_key: str | None = None) -> Iterator[None]:
    """Let errors of a policy beside the run's own name its keys as the user writes them.

    To its backend every policy is the section `policy`.

    Example, of `naming_section("ppo.value_policy", model_key="ppo.value_model")`:
        policy.precision=float7      -> ppo.value_policy.precision=float7
        policy.model_name='missing'  -> ppo.value_model='missing'

    Args:
        path: Of its section.
        model_key: The key that names its model. None: `model_name` of the section.
    """
    try:
        yield
    except ValueError as error:
        if error.args and isinstance(error.args[0], str):
            text = _MODEL_KEY.sub(model_key or f"{path}.model_name", error.args[0])
            # In place, as it has a class, a cause and notes of its own.
            error.args = (_SECTION.sub(f"{path}.", text), *error.args[1:])
        raise


def _optimizer_name(policy: Mapping[str, object]) -> object:
    optimizer = policy.get("optimizer")
    return optimizer.get("name") if isinstance(optimizer, Mapping) else None


def _is_enabled(key: str, value: object) -> bool:
    return key.endswith("_cfg") and isinstance(value, Mapping) and bool(value.get("enabled"))


def absolute_if_directory(model: str) -> str:
    """Return a model's name as ranks and engines find it, which run in another directory."""
    # Any other name is looked up on the Hugging Face hub.
    return os.path.abspath(model) if os.path.isdir(model) else model
