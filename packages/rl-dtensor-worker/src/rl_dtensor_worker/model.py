"""From a checkpoint on disk to a sharded model on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from rl_dtensor_worker.config import load_model_config
from rl_dtensor_worker.fsdp import shard_model
from rl_dtensor_worker.model_classes import auto_class

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from rl_dtensor_worker.config import WorkerConfig


def build_model(config: WorkerConfig, *, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Return the pretrained model, sharded over `mesh`, in float32 and in eval mode.

    The first rank reads the checkpoint; the others get their shards from it.
    """
    model_config = load_model_config(config)
    pretrained = _load_pretrained(config, model_config) if dist.get_rank() == 0 else None
    with torch.device("meta"):
        model = auto_class(config.head, model_config).from_config(
            model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard_model(
        model,
        decoder_layers(model),
        mesh=mesh["dp"],
        compute_dtype=config.compute_dtype,
        cpu_offload=config.cpu_offload,
    )
    model.to_empty(device="cpu" if config.cpu_offload else device)
    model.tie_weights()
    _broadcast_weights(model, pretrained, device=device)
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


def _load_pretrained(config: WorkerConfig, model_config: Any) -> nn.Module:
    return auto_class(config.head, model_config).from_pretrained(
        config.model_name,
        config=model_config,
        dtype=torch.float32,
        trust_remote_code=config.trust_remote_code,
    )


def _broadcast_weights(
    model: nn.Module, pretrained: nn.Module | None, *, device: torch.device
) -> None:
    """Fill `model`'s shards and buffers from the first rank's `pretrained`. Collective."""
    full_state = {} if pretrained is None else pretrained.state_dict()
    set_model_state_dict(
        model,
        full_state,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    sources = {} if pretrained is None else dict(pretrained.named_buffers())
    for name, buffer in model.named_buffers():
        value = buffer.detach().to(device)
        if pretrained is not None:
            value.copy_(sources[name])
        dist.broadcast(value, src=0)
        buffer.data = value
