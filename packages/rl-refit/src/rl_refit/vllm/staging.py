"""A second set of a vLLM model's weights, loaded beside those that serve and exchanged with them.

vLLM's loaders work on modules: `StagedModel` has a twin of every module, with the module's class
and attributes and with parameters and buffers of its own. A layerwise reload of the twins runs
beside the forward passes of the model. `swap` then exchanges what the reload has changed: the
memory behind the parameters, and attributes such as the repacked weights of the CPU's kernels. On a
CPU no element is copied, so that it takes as long for a large model as for a small one of as many
layers.
"""

# vLLM is not installed where this is checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

from rl_refit.errors import RefitError
from rl_refit.host_memory import available_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.reload.types import LayerTensors

# Of a module's attributes, those that hold its tensors and children.
_CONTAINERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
# What a reload leaves on a model for itself.
_OF_RELOADS = ("_original_do_torchao_reload", "_do_torchao_reload")
# Besides the weights: a layer while it is assembled, and what allocators round up.
_SPARE = 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Where a second set of weights can be held.

    Attributes:
        place: "device" or "host", which are the same on a CPU: "host"; None for nowhere.
        reason: Why nowhere.
    """

    place: str | None
    reason: str = ""


def find_room(
    model: torch.nn.Module, config: VllmConfig, device: torch.device, *, only_host: bool
) -> Room:
    """Return where a second set of this worker's weights can be held.

    Args:
        model: A model of vLLM.
        config: The engine's.
        device: Where the model is.
        only_host: Leave the device's memory alone.
    """
    if reason := _why_unsupported(model, config):
        return Room(place=None, reason=reason)
    needed = int(_SPARE * _model_bytes(model))
    if device.type != "cpu" and not only_host:
        free, _ = torch.cuda.mem_get_info(device)
        if free >= needed:
            return Room(place="device")
    # Every worker of the engine on this machine asks at the same time.
    needed_here = needed * config.parallel_config.world_size
    free = available_bytes()
    if free >= needed_here:
        return Room(place="host")
    return Room(
        place=None,
        reason=f"it needs {needed_here >> 20} MiB of host memory, {free >> 20} MiB are available",
    )


class StagedModel:
    """The twin of a model, with weights of its own.

    Args:
        model: The one that serves.
        place: Where the twin's weights are held, see `Room`.

    Attributes:
        place: The argument.
        model: The twin, for a reload. It cannot run.
    """

    def __init__(self, model: torch.nn.Module, place: str) -> None:
        self.place = place
        self._twins: dict[int, torch.nn.Module] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self.model: Any = self._twin(model)
        self._pairs = [(module, self._twins[id(module)]) for module in model.modules()]
        self._tensors.clear()
        for live, twin in self._pairs:
            info, own = get_layerwise_info(live), get_layerwise_info(twin)
            own.restore_device = info.restore_device
            own.restore_metadata = own_metadata(info.restore_metadata, live, twin)
        self._before = [dict(vars(twin)) for _, twin in self._pairs]

    def require_alike(self) -> None:
        """Raise `RefitError` unless every loaded tensor can take the place of the live one."""
        for live, twin in self._pairs:
            for name, ours, theirs in _tensor_pairs(live, twin):
                same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
                if not same or ours.stride() != theirs.stride():
                    raise RefitError(
                        f"{type(live).__name__}.{name} serves as {ours.dtype} {list(ours.shape)}, "
                        f"and was loaded as {theirs.dtype} {list(theirs.shape)}"
                    )

    def swap(self) -> None:
        """Exchange the loaded weights with those that serve; call it between two forward passes."""
        exchanged: set[int] = set()
        for (live, twin), before in zip(self._pairs, self._before, strict=True):
            for _, ours, theirs in _tensor_pairs(live, twin):
                if id(ours) not in exchanged:  # tied ones are parameters of several layers
                    exchanged.add(id(ours))
                    _exchange(ours, theirs)
            for name in _changed(twin, before):
                kept = vars(live).get(name)
                vars(live)[name], vars(twin)[name] = vars(twin)[name], kept
        self._before = [dict(vars(twin)) for _, twin in self._pairs]
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _twin(self, module: torch.nn.Module) -> torch.nn.Module:
        if (known := self._twins.get(id(module))) is not None:
            return known
        twin = self._twins[id(module)] = copy.copy(module)
        own = vars(twin)
        for name in ("_parameters", "_buffers"):
            own[name] = {key: self._copy(tensor) for key, tensor in own[name].items()}
        own["_non_persistent_buffers_set"] = set(own["_non_persistent_buffers_set"])
        own["_modules"] = {
            name: None if child is None else self._twin(child)
            for name, child in own["_modules"].items()
        }
        return twin

    def _copy(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if (known := self._tensors.get(id(tensor))) is not None:
            return known
        on_host = self.place == "host" and tensor.device.type != "cpu"
        made: Any = torch.empty_like(
            tensor.data, device="cpu" if on_host else None, pin_memory=on_host or None
        )
        # With values, as a reload leaves some tensors alone: rotary tables, scales without a file.
        made.copy_(tensor.data)
        made.__class__ = tensor.__class__
        made.__dict__ = tensor.__dict__.copy()
        self._tensors[id(tensor)] = made
        return made


def _why_unsupported(model: torch.nn.Module, config: VllmConfig) -> str:
    """Return why the weights of a model cannot be staged; "" if they can.

    What is refused keeps weights where no twin has its own: in the objects that methods of
    quantisation, experts and latent attention share between a layer and its twin.
    """
    if config.model_config.quantization is not None:
        return f"the model is quantised ({config.model_config.quantization})"
    if config.lora_config is not None:
        return "the engine serves adapters"
    if config.speculative_config is not None:
        return "the engine decodes speculatively"
    allowed = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        is_attention = is_deferred_attention_layer(layer)
        if is_attention and type(layer) is not Attention:
            return f"{name} is of class {type(layer).__name__}"
        if not is_attention and method is not None and type(method) not in allowed:
            return f"{name} has the method {type(method).__name__}"
    storages: dict[int, tuple[int, str]] = {}
    for name, tensor in _named_tensors(model):
        if tensor.nbytes:
            place = tensor.untyped_storage().data_ptr()
            owner, known = storages.setdefault(place, (id(tensor), name))
            if owner != id(tensor):
                return f"{name} shares the memory of {known}"
    return ""


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _model_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all weights, in the shapes in which they are loaded."""
    # Not those of the parameters: on a CPU their memory is replaced by repacked copies elsewhere.
    return sum(
        tensor.nbytes
        for layer in model.modules()
        for tensors in get_layerwise_info(layer).restore_metadata
        for tensor in tensors.values()
    )


def own_metadata(
    metadata: LayerTensors, live: torch.nn.Module, twin: torch.nn.Module
) -> LayerTensors:
    """Return a copy of a layer's metadata, of which the loaders are methods of its twin.

    vLLM's own metadata keeps the loaders of the layer's last reload, which count for that layer.
    """

    def own(tensor: torch.Tensor) -> torch.Tensor:
        made: Any = to_meta_tensor(tensor)
        if (loader := getattr(made, "weight_loader", None)) is not None:
            while getattr(loader, "__name__", "") == "online_process_loader":
                loader = loader.__wrapped__
            made.weight_loader = loader
        for key, value in vars(made).items():
            if isinstance(value, MethodType) and value.__self__ in (live, layer_ref_sentinel):
                vars(made)[key] = value.__func__.__get__(twin)
        return made

    parameters, buffers = metadata
    return (
        {name: own(tensor) for name, tensor in parameters.items()},
        {name: own(tensor) for name, tensor in buffers.items()},
    )


def _tensor_pairs(
    live: torch.nn.Module, twin: torch.nn.Module
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, live tensor and the twin's for each parameter and buffer."""
    for container in ("_parameters", "_buffers"):
        theirs = vars(twin)[container]
        for name, tensor in vars(live)[container].items():
            if tensor is not None:
                yield name, tensor, theirs[name]


def _exchange(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if ours.device.type == "cpu":
        ours.data, theirs.data = theirs.data, ours.data
    else:
        # CUDA graphs have recorded the address.
        ours.data.copy_(theirs.data, non_blocking=True)


def _changed(twin: torch.nn.Module, before: dict[str, Any]) -> list[str]:
    """Return the attributes that a reload has set or replaced."""
    ignored = (*_CONTAINERS, *_OF_RELOADS)
    missing = object()
    return [
        name
        for name, value in vars(twin).items()
        if name not in ignored and before.get(name, missing) is not value
    ]
