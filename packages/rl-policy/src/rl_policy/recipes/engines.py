"""The inference engines that a run's configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_refit.transports import find_transport

from rl_policy import backends
from rl_policy.config import RunConfig
from rl_policy.generation.backends import load_engine
from rl_policy.generation.engine_config import generation_of_policy


def engine_section(config: RunConfig, *, model: str) -> Any:
    """Return the `GenerationConfig` of the engines: the policy's, and what follows from it."""
    return {**generation_of_policy(config.policy), "model_name": model}


def keeps_weights(config: RunConfig) -> bool:
    """Return whether engines that sleep still have their weights afterwards."""
    section: Mapping[str, Any] = config.policy["generation"].get("vllm_cfg") or {}
    return section.get("sleep_level", 1) == 1


def check_engines(config: RunConfig) -> None:
    """Let the engines check their section, before anything starts.

    Raises:
        ValueError: What it says cannot be done; the message names key and numbers.
        ImportError: The engines are not installed.
        NotImplementedError: The training backend does not hand its weights over.
    """
    if not config.has_engines:
        return
    backend = backends.enabled_backend(config.policy)
    backends.require_sending(backend, backends.load(backend))
    if config.refit.transport is not None:
        find_transport(config.refit.transport)
    engine_class: Any = load_engine(config.policy["generation"]["backend"])
    engine_class.validate_config(engine_section(config, model=config.policy["model_name"]))
