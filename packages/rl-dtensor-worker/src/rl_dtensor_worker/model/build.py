"""From a checkpoint on disk to a sharded model on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_dtensor_worker.attention.check import check_rotation
from rl_dtensor_worker.config import load_model_config
from rl_dtensor_worker.model.classes import auto_class
from rl_dtensor_worker.model.load import ModelLoader
from rl_dtensor_worker.model.lora import (
    adapted_layers,
    fill_adapters,
    inject_adapters,
    trained_beside,
)
from rl_dtensor_worker.parallel.fsdp import shard_model
from rl_dtensor_worker.parallel.tensor.plans import apply_plan, check_sizes, plan_of
from rl_dtensor_worker.value_forward import value_layer_name

if TYPE_CHECKING:
    from torch import nn

    from rl_dtensor_worker.config import WorkerConfig
    from rl_dtensor_worker.parallel.mesh import Meshes
    from rl_dtensor_worker.parallel.tensor.group import TensorParallel


def build_model(
    config: WorkerConfig,
    *,
    meshes: Meshes,
    tensor_parallel: TensorParallel | None,
    device: torch.device,
) -> nn.Module:
    """Return the pretrained model, sharded over `meshes` and in eval mode.

    What is trained is in float32, and what adapters leave as it is, in the compute dtype. Each rank
    reads its own shards from the checkpoint.

    Args:
        config: What to build.
        meshes: All ranks.
        tensor_parallel: The ranks that share each layer; None where there is one.
        device: Where the shards lie.

    Raises:
        ValueError: The ranks cannot share the model's heads, experts or the like equally.
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
        is_judge = config.head != "language_model"
        inject_adapters(
            model,
            config.adapters,
            model_name=config.model_name,
            head=config.head,
            value_layer=value_layer_name(model) if is_judge else None,
        )
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
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
    model.tie_weights(recompute_mapping=False)
    loader.fill(model, device=device)
    if config.adapters is not None:
        fill_adapters(model, config.adapters, seed=config.seed)
    return model.eval()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated blocks, as it names them itself.

    Raises:
        ValueError: It names none, or has none of that name.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no module named in _no_split_modules={sorted(names)}: "
            "its layers cannot be sharded one by one"
        )
    return layers


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds: what is trained beside adapters, else the whole state."""
    return trained_beside(model) if adapted_layers(model) else persistent_state(model)


def persistent_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters (tied ones once) and persistent buffers."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    persistent = set(model.state_dict())
    tensors.update((n, b) for n, b in model.named_buffers() if n in persistent)
    return tensors
