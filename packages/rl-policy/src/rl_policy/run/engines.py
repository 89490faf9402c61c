"""The inference engines that a run's configuration asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rl_refit.transports import find_transport
from transformers import AutoConfig

from rl_policy.backends import TrainingBackend, load_engine
from rl_policy.config import RefitSection, RunConfig, Settings
from rl_policy.generation.vllm.config import generation_of_policy


def engine_section(config: RunConfig, *, model: str) -> Settings:
    """Return the `GenerationConfig` of the engines: the policy's, and what follows from it."""
    return {**generation_of_policy(config.policy), "model_name": model}


def keeps_weights(config: RunConfig) -> bool:
    """Return whether engines that sleep still have their weights afterwards."""
    section: Settings = config.policy["generation"].get("vllm_cfg") or {}
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
    TrainingBackend.of_config(config.policy).require_sending()
    if (transport := config.section(RefitSection).transport) is not None:
        find_transport(transport)
    _check_model(config)
    engine_class: Any = load_engine(config.policy["generation"]["backend"])
    section = engine_section(config, model=config.policy["model_name"])
    engine_class.validate_config(section)
    if not config.has_builtin_model:
        _check_positions(section)
    _check_bundles(config, tensor_parallel_size=section["vllm_cfg"].get("tensor_parallel_size", 1))
    if not section["vllm_cfg"].get("weight_transfer", True):
        raise ValueError(
            "policy.generation.vllm_cfg.weight_transfer=False: a run gives its engines new weights"
        )


def _check_model(config: RunConfig) -> None:
    given, own = config.policy["generation"].get("model_name"), config.policy["model_name"]
    if given not in (None, own):
        raise ValueError(
            f"policy.generation.model_name={given!r} contradicts policy.model_name={own!r}: the "
            "engines of a run sample from the policy's weights"
        )


def _check_positions(section: Settings) -> None:
    """Check that the model has a position for each token of the longest row.

    vLLM refuses the same when an engine starts, which is after the policy's workers have. Scaled
    positions are left to it: how far they reach depends on the kind of scaling.
    """
    engine = section["vllm_cfg"]
    longest = engine.get("max_model_len")
    is_overridden = "hf_overrides" in (engine.get("engine_kwargs") or {})
    if longest is None or is_overridden or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1":
        return
    model = AutoConfig.from_pretrained(
        section["model_name"], trust_remote_code=engine["trust_remote_code"]
    ).get_text_config()
    rotary: Settings = getattr(model, "rope_parameters", None) or {}
    # Some models have a section for each kind of layer.
    sections = [each for each in rotary.values() if isinstance(each, Mapping)] or [rotary]
    if any(each.get("rope_type", "default") != "default" for each in sections):
        return
    positions = getattr(model, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ValueError(
            f"policy.generation.vllm_cfg.max_model_len={longest}, which is "
            "policy.max_total_sequence_length where it is not set, exceeds the model's "
            f"max_position_embeddings={positions}"
        )


def _check_bundles(config: RunConfig, *, tensor_parallel_size: int) -> None:
    if config.is_colocated:
        key, bundles = "cluster.bundle_ct_per_node_list", config.cluster.bundle_ct_per_node_list
    else:
        key, bundles = "policy.generation.colocated.resources", config.engine_bundles
    if not bundles or min(bundles) < 1:
        raise ValueError(f"{key} asks for {bundles} devices by node: an engine needs one")
    for count in bundles:
        if count % tensor_parallel_size:
            raise ValueError(
                f"policy.generation.vllm_cfg.tensor_parallel_size={tensor_parallel_size} does not "
                f"divide the {count} devices that a node has by {key}"
            )
