"""One pass of vLLM's layerwise reload, with the safeguards that vLLM leaves to its caller.

vLLM collects a layer's tensors until all of its elements have arrived, then processes the layer
(fuses, shards, repacks it) and copies the result into the live parameters. Added here: tensors that
it keeps are cloned before their buffer is refilled, missing tensors are detected, an incomplete
load can be abandoned, and on the CPU tied output layers and experts are repacked.
"""

# vLLM is not installed where this is checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
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
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
    make_online_process_loader,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, CopyCounter
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rl_refit.errors import RefitError

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
    from vllm.model_executor.models.interfaces_base import VllmModel

# Of torch's C type, which has the getter of `data`.
_GET_DATA: Any = vars(torch.Tensor.__base__)["data"].__get__
_MOST_NAMES = 8
"""That one error message lists."""


class LayerwiseReload:
    """Reloads all parameters of a model, from its construction to `complete` or `abandon`.

    Args:
        model: A model of vLLM.
        model_config: Its configuration.
        device: Where the model is.
    """

    def __init__(self, model: VllmModel, model_config: ModelConfig, device: torch.device) -> None:
        self._model = model
        self._model_config = model_config
        self._device = device
        if device.type == "cpu":
            _repack_experts_in_reloads(model)
        _name_loaders(model)
        initialize_layerwise_reload(model)
        self._layers = [get_layerwise_info(layer) for layer in model.modules()]
        self._own_loaders: list[tuple[Any, Any]] = []

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Pass one bucket's tensors to vLLM's loader; they may be overwritten afterwards."""
        with _DirectCopies(self._model):
            self._model.load_weights(iter(tensors))
        _clone_kept(self._layers, tensors)

    def load_parameters(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load parameters as a whole, in the layout in which vLLM loads them.

        Args:
            tensors: This worker's shards by vLLM's names, such as "model.norm.weight". They must
                stay what they are until `complete`.
        """
        for prefix, layer in self._model.named_modules():
            names = [name for name, _ in _direct_tensors(layer) if f"{prefix}.{name}" in tensors]
            # All of the layer's first, as the last one's load makes vLLM assemble the layer.
            for name in names:
                parameter = getattr(layer, name)
                if name not in SKIP_LOAD_TENSORS:
                    self._own_loaders.append((parameter, _get_original_loader(parameter)))
                    _load_with(_fill, layer, name, parameter)
            for name in names:
                parameter, tensor = getattr(layer, name), tensors[f"{prefix}.{name}"]
                if name in SKIP_LOAD_TENSORS:
                    parameter.data.copy_(tensor)
                else:
                    parameter.weight_loader(parameter, tensor)

    def complete(self) -> None:
        """Let vLLM process the loaded layers.

        Raises:
            RefitError: Parameters, or shards of them, were not loaded.
        """
        self._require_all()
        tied = _tied_layers(self._model)
        self._finalize()
        for layer in tied:
            layer.quant_method.process_weights_after_loading(layer)
        if self._device.type == "cuda":
            # Asynchronous CUDA errors surface here, before this receiver reports `Done`.
            torch.cuda.current_stream(self._device).synchronize()

    def abandon(self) -> None:
        """Give up: incomplete layers keep their old weights.

        The model is then a mixture of old and new weights. All of them are materialised tensors, so
        that the engine can sleep, wake up and be loaded again.
        """
        # Otherwise the next reload would resume an incomplete layer, and count the tensors of this
        # one towards its elements.
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        self._finalize()

    def _finalize(self) -> None:
        finalize_layerwise_reload(self._model, self._model_config)
        # vLLM keeps the loaders for its next reload, which may be by tensors of the checkpoint.
        for parameter, loader in self._own_loaders:
            parameter.weight_loader = loader
        self._own_loaders.clear()

    def _require_all(self) -> None:
        """Raise unless every parameter has received all of its shards.

        vLLM itself assumes that a layer with some of its elements is padded, and leaves the rest
        uninitialised; a layer without any keeps its old weights. Neither raises.
        """
        if self._model_config.quantization is not None and not _holds_block_fp8(self._model):
            return  # vLLM computes the scales itself, or reads them from a checkpoint
        # Multimodal models may declare tied embeddings in the outer config alone.
        configs = (self._model_config.hf_config, self._model_config.hf_text_config)
        ties = any(getattr(config, "tie_word_embeddings", False) for config in configs)
        missing = _missing_shards(self._model, without=ParallelLMHead if ties else ())
        if missing:
            listed = ", ".join(missing[:_MOST_NAMES])
            listed += ", ..." if len(missing) > _MOST_NAMES else ""
            raise RefitError(
                f"the sender's tensors leave out shards of {len(missing)} of vLLM's parameters: "
                f"{listed}"
            )


def _holds_block_fp8(model: VllmModel) -> bool:
    """Return whether the model's checkpoint is in block-FP8: all scales come with the weights."""
    methods = (getattr(layer, "quant_method", None) for layer in model.modules())
    return any(getattr(method, "block_quant", False) for method in methods)


def _name_loaders(model: VllmModel) -> None:
    """Give each `functools.partial` among the weight loaders a name, by which vLLM knows its own.

    MiniMax-M2 has such loaders; without one vLLM could not reload it.
    """
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial):
            vars(loader).setdefault("__name__", loader.func.__name__)


class _DirectCopies(TorchFunctionMode):
    """Inside, `parameter.copy_(tensor)` is a load of the parameter, as by its `weight_loader`.

    In a reload vLLM's parameters are on the meta device, where a copy does nothing: vLLM counts on
    `weight_loader` being called. Its loader of gpt-oss copies experts and sinks directly.
    """

    def __init__(self, model: VllmModel) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        is_copy = func in (_GET_DATA, torch.Tensor.copy_)
        # Within a `weight_loader` vLLM counts copies to the meta device, which are its own.
        if is_copy and not isinstance(_get_current_dispatch_mode(), CopyCounter):
            owner = self._owner_of(args[0]) if args[0].is_meta else None
            if owner is not None:
                # The parameter stands for its data, so that a copy to that is seen.
                return args[0] if func is not torch.Tensor.copy_ else _load(*owner, *args)
        return func(*args, **(kwargs or {}))

    def _owner_of(self, parameter: torch.nn.Parameter) -> tuple[torch.nn.Module, str] | None:
        for layer in self._model.modules():
            for name, each in layer.named_parameters(recurse=False):
                if each is parameter:
                    return layer, name
        return None


def _load(
    layer: torch.nn.Module, name: str, parameter: Any, tensor: torch.Tensor
) -> torch.nn.Parameter:
    """Load `tensor` into a parameter of any of vLLM's classes."""
    # The loader that the layer has may take an expert at a time.
    _load_with(default_weight_loader, layer, name, parameter)
    parameter.weight_loader(parameter, tensor)
    return parameter


def _load_with(loader: Any, layer: torch.nn.Module, name: str, parameter: Any) -> None:
    parameter.weight_loader = loader
    parameter.weight_loader = make_online_process_loader(layer, name)


def _fill(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    # By `copy_`, as vLLM counts the elements that are copied.
    param.data.copy_(loaded_weight)


def _direct_tensors(layer: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a layer's own parameters and buffers."""
    yield from layer.named_parameters(recurse=False)
    yield from layer.named_buffers(recurse=False)


def _clone_kept(
    layers: Sequence[LayerReloadingInfo], tensors: list[tuple[str, torch.Tensor]]
) -> None:
    """Clone the bucket's tensors that vLLM's loader still references.

    Attention layers and padded layers keep their tensors until `complete`, even if all of them have
    arrived: the transport refills the buffer before that.

    Args:
        layers: vLLM's state of each layer.
        tensors: The bucket's.
    """
    # By storage: what the loader keeps may be a view (narrowed, transposed) of a bucket's tensor.
    borrowed = {tensor.untyped_storage().data_ptr() for _, tensor in tensors}
    for layer in layers:
        for _, call in layer.loaded_weights:
            for name, value in call.arguments.items():
                is_tensor = isinstance(value, torch.Tensor) and value.device.type != "meta"
                if is_tensor and value.untyped_storage().data_ptr() in borrowed:
                    call.arguments[name] = value.clone()


def _missing_shards(model: torch.nn.Module, *, without: type | tuple[()]) -> list[str]:
    """Return the incomplete parameters, by vLLM's name, with the shards that were not loaded.

    Only layers whose elements have not all arrived can be incomplete. Attention layers are skipped,
    as they have nothing but scales of their own, and so are layers of the class `without`.
    """
    missing: list[str] = []
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer) or isinstance(layer, without):
            continue
        for name, _ in layer.named_parameters(recurse=False):
            if name in SKIP_LOAD_TENSORS:
                continue  # vLLM loads these in place, and does not count them
            loads = [call.arguments for loaded, call in info.loaded_weights if loaded == name]
            lacks = _shards_not_loaded(layer, loads) if loads else ["all"]
            if lacks:
                missing.append(f"{prefix}.{name} ({', '.join(lacks)})")
    return missing


def _shards_not_loaded(layer: Any, loads: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which of the tensors that vLLM fuses into one parameter have not been loaded.

    Args:
        layer: Any of vLLM's layers; which attributes it has depends on its class.
        loads: The arguments of the parameter's `weight_loader` calls so far.
    """
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
    """Return the output layers that received no weight of their own in this reload.

    They share the embedding's weight, which is loaded under the embedding's name. On the CPU vLLM
    multiplies with a repacked copy, which a reload refreshes for the embedding alone.
    """
    return [
        layer
        for layer in model.modules()
        if isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod)
        and get_layerwise_info(layer).can_load()
        and not get_layerwise_info(layer).load_numel
    ]


def _repack_experts_in_reloads(model: torch.nn.Module) -> None:
    """Repack the experts' weights for the CPU's kernel in every reload.

    vLLM repacks them only while a layer has no kernel yet. In a reload the kernel exists, and would
    be given weights in the checkpoint's layout: wrong results without an error.
    """
    # Imported here, as workers on a GPU do not need it and may not be able to import it.
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for layer in model.modules():
        method: FusedMoEMethodBase = getattr(layer, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if isinstance(getattr(kernel, "fused_experts", None), CPUUnquantizedExperts):
            method.process_weights_after_loading = partial(_process_without_kernel, method)


def _process_without_kernel(method: FusedMoEMethodBase, layer: torch.nn.Module) -> None:
    method.moe_kernel = None
    type(method).process_weights_after_loading(method, layer)
