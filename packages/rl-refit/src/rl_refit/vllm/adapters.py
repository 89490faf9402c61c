"""The adapter that a vLLM engine serves in place of merged weights: held, exchanged, put aside.

An engine with `enable_lora` wraps its linear layers. Every request of a trainer's engine names one
adapter, `ADAPTER_ID`, whose factors a refit replaces: requests that run go on with the new ones, as
they do with new weights. Before the first refit the factors are zeros, which leave the model as it
was loaded.
"""

# vLLM is not installed where this is checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name

from rl_refit.adapters import DOWN, UP, adapted_layers
from rl_refit.errors import RefitError
from rl_refit.vllm import ADAPTER_ID

# What peft's files have before each name, which is what vLLM parses.
_PREFIX = "base_model.model."
_MOST_NAMES = 8

Tensors = Mapping[str, torch.Tensor]


class AdapterSlot:
    """The one adapter of an engine.

    Args:
        model: A model of vLLM, loaded with `enable_lora`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._manager = model.lora_manager
        self._serving: dict[str, LoRALayerWeights] = {}
        self._staged: dict[str, LoRALayerWeights] | None = None
        self._received: dict[str, torch.Tensor] = {}

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Keep copies of factors until `stage`."""
        # A buffer of the transport is refilled, and vLLM multiplies B by its scale in place.
        self._received |= {name: tensor.cpu().clone() for name, tensor in tensors}

    def stage(self) -> None:
        """Make the adapter of the kept factors the one of the next `swap`.

        Raises:
            RefitError: vLLM has no layer for some of them, or too low a rank.
        """
        received, self._received = self._received, {}
        layers = [self._layer_weights(name, received) for name in adapted_layers(received)]
        self._staged = {layer.module_name: layer for layer in layers}
        unknown = sorted(self._staged.keys() - self._linear_layers())
        if unknown:
            raise RefitError(
                f"vLLM takes no adapters of {len(unknown)} layers of {type(self._model).__name__}: "
                f"{', '.join(unknown[:_MOST_NAMES])}"
            )

    def swap(self) -> None:
        """Serve the staged adapter from the next step on; without one, the one that served."""
        if self._staged is not None:
            self._serving, self._staged = self._staged, None
        # vLLM packs in place, and drops every adapter when an update of weights is finished.
        layers = {name: _copy_of(layer) for name, layer in self._serving.items()}
        self._manager.remove_adapter(ADAPTER_ID)
        if layers:
            adapter = LoRAModel(ADAPTER_ID, _rank_of(layers), layers)
        else:
            adapter = self._manager.create_dummy_lora(ADAPTER_ID, 1, self._model.embedding_modules)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(ADAPTER_ID)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def abandon(self) -> None:
        """Drop what was received and not swapped."""
        self._staged = None
        self._received = {}

    def take_out(self) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
        """Put the base's own layers in place of those that apply adapters, for a reload.

        vLLM's loaders know parameters by their names without wrappers, and count elements by layer.

        Returns:
            The argument of `put_back`.
        """
        wrapped = [
            (self._model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], module)
            for name, module in self._model.named_modules(remove_duplicate=False)
            if isinstance(module, BaseLayerWithLoRA)
        ]
        for parent, name, module in wrapped:
            setattr(parent, name, module.base_layer)
        return wrapped

    def put_back(self, wrapped: list[tuple[torch.nn.Module, str, torch.nn.Module]]) -> None:
        """Put back the layers that `take_out` has taken."""
        for parent, name, module in wrapped:
            setattr(parent, name, module)

    def _linear_layers(self) -> set[str]:
        """Return the linear layers that vLLM adapts, those that it fuses by their own names."""
        packed = self._manager.packed_modules
        return {
            part
            for name, module in self._manager.modules.items()
            if isinstance(module, BaseLinearLayerWithLoRA)
            for part in packed.get(name, [name])
        }

    def _layer_weights(self, layer: str, tensors: Tensors) -> LoRALayerWeights:
        down, up = tensors[layer + DOWN], tensors[layer + UP]
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        name, _ = parse_fine_tuned_lora_name(f"{_PREFIX}{layer}{DOWN}", mapper)
        config = self._manager.lora_config
        if len(down) > config.max_lora_rank:
            raise RefitError(
                f"the adapter has rank {len(down)}, and the engine's max_lora_rank is "
                f"{config.max_lora_rank}",
                tensor=layer + DOWN,
            )
        # The sender has multiplied B by the scale.
        return LoRALayerWeights(
            module_name=name,
            rank=len(down),
            lora_alpha=len(down),
            lora_a=down.to(config.lora_dtype),
            lora_b=up.to(config.lora_dtype),
        )


def _copy_of(layer: LoRALayerWeights) -> LoRALayerWeights:
    return LoRALayerWeights(
        module_name=layer.module_name,
        rank=layer.rank,
        lora_alpha=layer.lora_alpha,
        lora_a=layer.lora_a,
        lora_b=layer.lora_b,
    )


def _rank_of(layers: Mapping[str, LoRALayerWeights]) -> int:
    return max(layer.rank for layer in layers.values())
