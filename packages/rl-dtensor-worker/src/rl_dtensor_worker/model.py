"""From a checkpoint on disk to a sharded model on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from rl_dtensor_worker.config import load_model_config
from rl_dtensor_worker.fsdp import shard_model
from rl_dtensor_worker.loading import ModelLoader
from rl_dtensor_worker.plans import apply_plan, plan_of

if TYPE_CHECKING:
    from torch import nn

    from rl_dtensor_worker.config import WorkerConfig
    from rl_dtensor_worker.parallel import Meshes
    from rl_dtensor_worker.tensor_parallel import TensorParallel


def build_model(
    config: WorkerConfig,
    *,
    meshes: Meshes,
    tensor_parallel: TensorParallel | None,
    device: torch.device,
) -> nn.Module:
    """Return the pretrained model, sharded over `meshes`, in float32 and in eval mode.

    Each rank reads its own shards from the checkpoint.

    Args:
        config: What to build.
        meshes: All ranks.
        tensor_parallel: The ranks that share each layer; None where there is one.
        device: Where the shards lie.
    """
    model_config = load_model_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
    loader = ModelLoader(model, config)
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


def persistent_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds: parameters (tied ones once) and persistent buffers."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    persistent = set(model.state_dict())
    tensors.update((n, b) for n, b in model.named_buffers() if n in persistent)
    return tensors
