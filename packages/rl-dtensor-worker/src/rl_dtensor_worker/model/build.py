"""Build the pretrained model, sharded and on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_dtensor_worker.attention.check import check_rotation
from rl_dtensor_worker.config import load_model_config
from rl_dtensor_worker.model.heads import value_layer_name
from rl_dtensor_worker.model.load import ModelLoader, auto_class
from rl_dtensor_worker.model.lora import (
    adapted_layers,
    fill_adapters,
    inject_adapters,
    trained_parameters,
)
from rl_dtensor_worker.parallel.fsdp import shard_model
from rl_dtensor_worker.parallel.tensor.plans import apply_plan, check_sizes, plan_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from rl_dtensor_worker.config import EngineConfig
    from rl_dtensor_worker.parallel.mesh import Meshes
    from rl_dtensor_worker.parallel.tensor.group import TensorParallel


def build_model(
    config: EngineConfig,
    *,
    meshes: Meshes,
    tensor_parallel: TensorParallel | None,
    device: torch.device,
) -> PreTrainedModel:
    """Return the pretrained model, sharded over `meshes` and in eval mode.

    Trained parameters are in float32, frozen ones in the compute dtype. Each rank reads its own
    shards from the checkpoint.

    Args:
        config: The worker's config.
        meshes: Of all ranks.
        tensor_parallel: The ranks that shard each layer; None without tensor parallelism.
        device: Where the shards are.

    Raises:
        ValueError: The parallel sizes do not fit the model, or the checkpoint does not.
    """
    model_config = load_model_config(config)
    check_sizes(model_config, tensor_parallel_size=config.layout.tensor_parallel)
    check_rotation(model_config, context_parallel_size=config.layout.context_parallel)
    dtype = torch.float32 if config.adapters is None else config.compute_dtype
    with torch.device("meta"):
        model = auto_class(config.head, model_config).from_config(
            model_config, dtype=dtype, trust_remote_code=config.trust_remote_code
        )
    loader = ModelLoader(model, config)
    if config.adapters is not None:
        has_value_layer = config.head != "language_model"
        inject_adapters(
            model,
            config.adapters,
            model_name=config.model_name,
            head=config.head,
            value_layer=value_layer_name(model) if has_value_layer else None,
        )
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # Tensor parallelism first: FSDP shards the local shards, and wraps what adapters have added.
    if tensor_parallel is not None:
        apply_plan(model, plan_of(model, custom=config.custom_parallel_plan), tensor_parallel)
    shard_model(
        model,
        decoder_layers(model),
        mesh=meshes.fsdp,
        compute_dtype=config.compute_dtype,
        cpu_offload=config.cpu_offload,
    )
    model.to_empty(device="cpu" if config.cpu_offload else device)
    # `to_empty` has given tied parameters memory of their own.
    model.tie_weights(recompute_mapping=False)
    loader.fill(model, device=device)
    if config.adapters is not None:
        fill_adapters(model, config.adapters, seed=config.seed)
    return model.eval()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the model's repeated blocks, whose classes `_no_split_modules` names.

    Raises:
        ValueError: The model has no module of such a class.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no module named in _no_split_modules={sorted(names)}: "
            "FSDP cannot shard its layers one by one"
        )
    return layers


def trained_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint: with adapters the trained ones, else the full state."""
    return trained_parameters(model) if adapted_layers(model) else persistent_state(model)


def persistent_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return parameters (tied ones once) and persistent buffers."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    persistent = set(model.state_dict())
    tensors.update((n, b) for n, b in model.named_buffers() if n in persistent)
    return tensors
