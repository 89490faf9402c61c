"""A policy config, parsed once into the values that the DTensor engine uses."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from rl_interfaces import ParallelLayout, resolve_policy_config
from rl_interfaces.backend.checkpoint import hf_files
from rl_interfaces.backend.engine import DTYPES
from rl_interfaces.backend.steps import planned_by
from rl_interfaces.backend.torch_optim import (
    ClassConfig,
    SchedulerConfig,
    parse_optimizer,
    parse_scheduler,
    try_steps,
)

from rl_dtensor_worker.parallel.mesh import plan_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig

    Resolved = Mapping[str, Any]  # A policy config with all defaults, as JSON holds it.


class LigerNotInstalledError(ImportError, ValueError):
    """The config has a fused head, and Liger is not installed; see `PeftNotInstalledError`."""


class PeftNotInstalledError(ImportError, ValueError):
    """The config enables LoRA, and peft is not installed.

    An ImportError, as an installation is the remedy, and a ValueError, as the config is invalid.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """The low-rank adapters that are trained; the fields are the keys of the section."""

    r: int
    lora_alpha: float
    lora_dropout: float
    target_modules: list[str] | str
    adapter_path: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything that the engine reads from the policy config."""

    model_name: str
    head: str
    """`language_model`, `reward` or `value`."""
    layout: ParallelLayout
    replicas: int | Literal["auto"]
    """Replicas of the sharded model among the data-parallel ranks; `auto`: by the model's size."""
    sequence_parallel: bool
    custom_parallel_plan: str | None
    compute_dtype: torch.dtype
    planned_by: str | None
    """See `rl_interfaces.backend.steps.planned_by`."""
    width_multiple: int
    max_grad_norm: float | None
    cpu_offload: bool
    activation_checkpointing: bool
    max_total_sequence_length: int | None
    attn_implementation: str | None
    """None: transformers' choice for the model."""
    model_dropout: bool
    """Whether the dropout of the model's config is on in train mode."""
    share_prefixes: bool
    """Whether the common start of neighbouring rows is computed once."""
    fused_head: bool
    """Whether Liger computes log-probabilities."""
    async_checkpoint: bool
    """Write checkpoints while training goes on."""
    trust_remote_code: bool
    seed: int
    adapters: AdapterConfig | None
    """None: the model itself is trained."""
    optimizer: ClassConfig | None
    scheduler: SchedulerConfig | None

    @property
    def lays_out_rows(self) -> bool:
        """Whether rows share a sequence or are sharded, which not every model is able to run."""
        is_packed = self.planned_by == "sequence_packing"
        return is_packed or self.share_prefixes or self.layout.context_parallel > 1

    @classmethod
    def from_policy_config(
        cls, config: Mapping[str, object], *, world_size: int, init_optimizer: bool
    ) -> EngineConfig:
        """Parse and check `config`.

        Raises:
            ValueError: It contradicts itself or the world size; the message names key and numbers.
        """
        resolved = resolve_policy_config(config)
        layout = plan_layout(resolved, world_size=world_size)
        _check_head(resolved)
        _check_sharing(resolved)
        optimizer = _parse_optimizer(resolved, wanted=init_optimizer)
        scheduler = parse_scheduler(resolved.get("scheduler"))
        if optimizer is not None:
            try_steps(optimizer, scheduler)
        return cls(
            model_name=resolved["model_name"],
            head=resolved["head"],
            layout=layout,
            replicas=resolved["dtensor_cfg"]["data_parallel_replicate_size"],
            sequence_parallel=_shards_sequences(resolved["dtensor_cfg"]),
            custom_parallel_plan=resolved["dtensor_cfg"].get("custom_parallel_plan"),
            compute_dtype=DTYPES[resolved["precision"]],
            planned_by=planned_by(resolved),
            width_multiple=resolved["make_sequence_length_divisible_by"],
            max_grad_norm=resolved.get("max_grad_norm"),
            cpu_offload=resolved["dtensor_cfg"]["cpu_offload"],
            activation_checkpointing=resolved["dtensor_cfg"]["activation_checkpointing"],
            max_total_sequence_length=resolved.get("max_total_sequence_length"),
            attn_implementation=_parse_attention(resolved),
            model_dropout=resolved["dtensor_cfg"]["model_dropout"],
            share_prefixes=resolved["dtensor_cfg"]["share_prefixes"],
            fused_head=_parse_fused_head(resolved),
            async_checkpoint=resolved["dtensor_cfg"]["async_checkpoint"],
            trust_remote_code=resolved["trust_remote_code"],
            seed=resolved["seed"],
            adapters=_parse_adapters(resolved),
            optimizer=optimizer,
            scheduler=scheduler,
        )


def load_model_config(config: EngineConfig) -> PreTrainedConfig:
    """Return the model's transformers config, see `hf_files.load_model_config`."""
    # Reward and value heads have one score per row or token.
    labels = {} if config.head == "language_model" else {"num_labels": 1}
    return hf_files.load_model_config(
        config.model_name, trust_remote_code=config.trust_remote_code, **labels
    )


def _shards_sequences(section: Resolved) -> bool:
    """Return whether activations are sharded along the sequence, which one rank has as a whole."""
    return section["sequence_parallel"] and section["tensor_parallel_size"] > 1


def _check_head(resolved: Resolved) -> None:
    if resolved["head"] != "language_model" and _shards_sequences(resolved["dtensor_cfg"]):
        raise ValueError(
            f"policy.head={resolved['head']!r} contradicts "
            "policy.dtensor_cfg.sequence_parallel=True: its head needs unsharded sequences"
        )


def _check_sharing(resolved: Resolved) -> None:
    section = resolved["dtensor_cfg"]
    if section["share_prefixes"] and section["context_parallel_size"] > 1:
        raise ValueError(
            "policy.dtensor_cfg.share_prefixes=True contradicts policy.dtensor_cfg."
            f"context_parallel_size={section['context_parallel_size']}: rows that share a prefix "
            "are not sharded along the sequence"
        )


def _parse_attention(resolved: Resolved) -> str | None:
    """Return the attention that the config names.

    Raises:
        ValueError: transformers does not know it, or it cannot shard the sequence.
    """
    section = resolved["dtensor_cfg"]
    name = section.get("attn_implementation")
    if name is None:
        return None
    # Both import transformers' model code.
    from transformers import AttentionInterface

    from rl_dtensor_worker.attention import NAME as PACKED_ATTENTION

    key = f"policy.dtensor_cfg.attn_implementation={name!r}"
    known = {"eager", *AttentionInterface().valid_keys()} - {PACKED_ATTENTION}
    known = sorted(each for each in known if not each.startswith("paged"))
    # Names of kernels on the hub are not among them: those would be downloaded and run.
    if name not in known:
        raise ValueError(f"{key} is unknown, transformers has {known}")
    shards = {
        "sequence_parallel": _shards_sequences(section),
        "context_parallel_size": section["context_parallel_size"] > 1,
        "share_prefixes": section["share_prefixes"],
    }
    for other, is_on in shards.items():
        if name != "sdpa" and is_on:
            raise ValueError(
                f"{key} contradicts policy.dtensor_cfg.{other}={section[other]}, which needs 'sdpa'"
            )
    return name


def _parse_fused_head(resolved: Resolved) -> bool:
    is_fused: bool = resolved["dtensor_cfg"]["fused_head"]
    if is_fused and find_spec("liger_kernel") is None:
        raise LigerNotInstalledError(
            "policy.dtensor_cfg.fused_head=True needs liger-kernel, which is not installed. "
            'Install it with: pip install "rl-dtensor-worker[liger]"'
        )
    return is_fused


def require_peft() -> None:
    """Raise `PeftNotInstalledError` unless peft is installed, which is not imported."""
    if find_spec("peft") is None:
        raise PeftNotInstalledError(
            "policy.dtensor_cfg.lora.enabled=True needs peft, which is not installed. Install it "
            'with: pip install "rl-dtensor-worker[lora]"'
        )


def _parse_adapters(resolved: Resolved) -> AdapterConfig | None:
    lora = resolved["dtensor_cfg"]["lora"]
    if not lora["enabled"]:
        return None
    require_peft()
    return AdapterConfig(
        r=lora["r"],
        lora_alpha=lora["lora_alpha"],
        lora_dropout=lora["lora_dropout"],
        target_modules=lora["target_modules"],
        adapter_path=lora.get("adapter_path"),
    )


def _parse_optimizer(resolved: Resolved, *, wanted: bool) -> ClassConfig | None:
    if not wanted:
        return None
    if "optimizer" not in resolved:
        raise ValueError(
            "policy.optimizer is not set, and init_optimizer=True needs it: give "
            "{name: torch.optim.AdamW, kwargs: {lr: ...}}, or pass init_optimizer=False"
        )
    return parse_optimizer(resolved["optimizer"])
