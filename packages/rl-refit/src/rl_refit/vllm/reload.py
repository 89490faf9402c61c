"""One pass of vLLM's layerwise reload, and what it leaves to its caller.

vLLM collects a layer's tensors until their number of elements is complete, then processes the layer
(fuses, shards, repacks it) and copies the result into the live parameters. What it does not do, and
is done here: copy what it keeps of a buffer that is refilled, detect missing tensors, give up an
incomplete load, and, on the CPU, repack tied output layers and experts.
"""

# vLLM is not installed where this is checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rl_refit.errors import RefitError

_MOST_NAMES = 8
"""That one error message lists."""


class LayerwiseReload:
    """Loads all parameters of a model anew; begins when it is made.

    Args:
        model: vLLM's.
        model_config: vLLM's.
        device: Where the model is.
    """

    def __init__(self, model: Any, model_config: Any, device: torch.device) -> None:
        self._model = model
        self._model_config = model_config
        self._device = device
        if device.type == "cpu":
            _repack_experts_in_reloads(model)
        initialize_layerwise_reload(model)
        self._layers = [get_layerwise_info(layer) for layer in model.modules()]

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Pass one bucket's tensors to vLLM's loader; they may be overwritten afterwards."""
        self._model.load_weights(iter(tensors))
        _clone_kept(self._layers, tensors)

    def complete(self) -> None:
        """Let vLLM process what was loaded.

        Raises:
            RefitError: Parameters, or parts of them, were not loaded.
        """
        self._require_all()
        tied = _tied_layers(self._model)
        finalize_layerwise_reload(self._model, self._model_config)
        for layer in tied:
            layer.quant_method.process_weights_after_loading(layer)
        if self._device.type == "cuda":
            # What fails on the device fails here, before the sender is told that all is loaded.
            torch.cuda.current_stream(self._device).synchronize()

    def abandon(self) -> None:
        """Give up: incomplete layers keep what they had.

        The model is then a mixture of old and new weights, all of them real tensors, which can be
        put to sleep and loaded again.
        """
        # Without this vLLM continues with an incomplete layer, and would count the old tensors as
        # half of those to come.
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self._model, self._model_config)

    def _require_all(self) -> None:
        """Raise unless every parameter has got all its parts.

        vLLM itself takes a layer that has got some for one with padding, and fills the rest with
        uninitialised memory; one that has got none keeps its old weights.
        """
        if self._model_config.quantization is not None:
            return  # vLLM computes the scales itself, or has them from elsewhere
        # A model of images and text may declare it in the outer config alone.
        configs = (self._model_config.hf_config, self._model_config.hf_text_config)
        ties = any(getattr(config, "tie_word_embeddings", False) for config in configs)
        missing = _missing_parts(self._model, without=ParallelLMHead if ties else ())
        if missing:
            listed = ", ".join(missing[:_MOST_NAMES])
            listed += ", ..." if len(missing) > _MOST_NAMES else ""
            raise RefitError(
                f"the sender's tensors leave out parts of {len(missing)} of vLLM's parameters: "
                f"{listed}"
            )


def _clone_kept(layers: Sequence[Any], tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Copy what the loader keeps of a bucket until a layer is complete.

    Attention layers and layers with padding keep their tensors until the end, even if all have
    come: the transport refills the buffer before that.

    Args:
        layers: vLLM's notes about each layer.
        tensors: The bucket's.
    """
    lent = {tensor.untyped_storage().data_ptr() for _, tensor in tensors}
    for layer in layers:
        for _, call in layer.loaded_weights:
            for name, value in call.arguments.items():
                is_tensor = isinstance(value, torch.Tensor) and value.device.type != "meta"
                if is_tensor and value.untyped_storage().data_ptr() in lent:
                    call.arguments[name] = value.clone()


def _missing_parts(model: torch.nn.Module, *, without: type | tuple[()]) -> list[str]:
    """Return the parameters that lack tensors, by vLLM's name, with the parts that they lack.

    Only layers that vLLM has not completed by the number of elements can lack any. Attention is
    skipped, which only has scales of its own, and so are layers of the class `without`.
    """
    missing: list[str] = []
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer) or isinstance(layer, without):
            continue
        for name, _ in layer.named_parameters(recurse=False):
            loads = [call.arguments for loaded, call in info.loaded_weights if loaded == name]
            lacks = _missing_shards(layer, loads) if loads else ["all"]
            if lacks:
                missing.append(f"{prefix}.{name} ({', '.join(lacks)})")
    return missing


def _missing_shards(layer: Any, loads: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which of the tensors that vLLM fuses into one parameter have not come."""
    if "expert_id" in loads[0]:
        shards = {load["shard_id"] for load in loads}
        if shards <= {"w1", "w3"} and layer.moe_config.is_act_and_mul:
            shards = {"w1", "w3"}
        # A three-dimensional tensor holds all experts of its shard.
        if any(load["loaded_weight"].dim() == 3 for load in loads):
            wanted = {(shard,) for shard in shards}
            found = {(load["shard_id"],) for load in loads}
        else:
            count = layer.moe_config.num_logical_experts
            wanted = {(shard, f"expert {index}") for shard in shards for index in range(count)}
            found = {(load["shard_id"], f"expert {load['expert_id']}") for load in loads}
        return sorted(" of ".join(part) for part in wanted - found)
    found = {load.get("loaded_shard_id") for load in loads}
    if None in found or not isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear):
        return []
    parts = {part for shard in found for part in (shard if isinstance(shard, tuple) else (shard,))}
    is_qkv = isinstance(layer, QKVParallelLinear)
    wanted = ("q", "k", "v") if is_qkv else range(len(layer.output_sizes))
    return [f"shard {part}" for part in wanted if part not in parts]


def _tied_layers(model: torch.nn.Module) -> list[Any]:
    """Return the output layers that got no weight of their own in this reload.

    They share the embedding's, which was loaded under its own name. On the CPU vLLM multiplies
    with a copy in the kernel's layout, which a reload makes again for the embedding alone.
    """
    return [
        layer
        for layer in model.modules()
        if isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod)
        and get_layerwise_info(layer).can_load()
        and not get_layerwise_info(layer).load_numel
    ]


def _repack_experts_in_reloads(model: torch.nn.Module) -> None:
    """Let experts on the CPU be processed in every reload as when they were first loaded.

    vLLM repacks their weights for the CPU's kernel only while there is no kernel yet; in a reload
    it would give that kernel the weights as they came.
    """
    # Only here: a GPU's workers do not use it, and may not be able to import it.
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if isinstance(getattr(kernel, "fused_experts", None), CPUUnquantizedExperts):
            method.process_weights_after_loading = partial(_process_without_kernel, method)


def _process_without_kernel(method: Any, layer: torch.nn.Module) -> None:
    method.moe_kernel = None
    type(method).process_weights_after_loading(method, layer)
