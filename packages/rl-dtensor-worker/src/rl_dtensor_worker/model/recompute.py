"""Activation checkpointing of transformers' layers, around all that replaces their `forward`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Let the layers of a model compute their activations again in the backward pass.

    From 5.24 on transformers does so in the `forward` of a layer's class. Tensor parallelism and
    packing wrap the `forward` of an instance, and what they set for it, such as full sequences,
    would not hold while it is computed again; under FSDP, whose classes are derived, nothing would
    be. Before, it was in `__call__`, and here it is again.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if "__call__" in vars(GradientCheckpointingLayer):
        return
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.gradient_checkpointing = False
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {"__call__": _call})


def _call(layer: GradientCheckpointingLayer, *args: object, **kwargs: object) -> object:
    call = partial(nn.Module.__call__, layer, **kwargs)
    if layer.training and torch.is_grad_enabled():
        checkpoint: Any = layer._gradient_checkpointing_func
        return checkpoint(call, *args)
    return call(*args)
