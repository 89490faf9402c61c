"""Low-rank adapters (LoRA): `W + scaling * B @ A`, where A and B are trained and W is frozen.

Layers, names and files are peft's, which is imported only if adapters are enabled. Loading, weight
transfer and export see each weight under its name in the model without adapters, with the adapter
merged; the optimizer and checkpoints see the trained parameters only.
"""

from __future__ import annotations

import logging
import math
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_interfaces.backend.checkpoint.hf_files import SafetensorsFiles, take
from rl_interfaces.backend.runtime import failing_together
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from rl_dtensor_worker.parallel.fsdp import full_tensor, local_tensor, owned_indices
from rl_dtensor_worker.parallel.structure import class_name

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from transformers import PreTrainedModel

    from rl_dtensor_worker.config import AdapterConfig

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]

_PATH = "policy.dtensor_cfg.lora"
_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.", ".lora_B.default."
_CONFIG_FILE, _FILE = "adapter_config.json", "adapter_model.safetensors"
_FILE_PREFIX = "base_model.model."
# Settings that determine what an adapter's numbers mean: a directory's must match the policy's.
_MEANINGS = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
_MEANINGS += ("use_dora", "lora_bias", "bias", "target_parameters")
_ALL_LINEAR = "all-linear"
# By name, as Falcon's is a subclass. Layers of other classes may return more than a product.
_LINEAR_CLASSES = frozenset(["Linear", "Conv1D", "FalconLinear"])
# Whose kernels read the weights of these layers, past an adapter: peft refuses them.
_STATE_SPACE_MODELS = frozenset(["falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"])
_STATE_SPACE_LAYERS = frozenset(["conv1d", "out_proj"])
_LAYER_NUMBER = re.compile(r"\.\d+")
_TASKS = {"language_model": "CAUSAL_LM", "reward": "SEQ_CLS", "value": "TOKEN_CLS"}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedWeight:
    """The adapter of one weight."""

    down: str
    """Name of A, `[r, inputs]`."""
    up: str
    """Name of B, `[outputs, r]`."""
    scaling: float
    is_transposed: bool = False
    """Whether the weight is `[inputs, outputs]`, as that of a `Conv1D` is."""

    def merge(self, weight: torch.Tensor, adapters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return `weight` with the adapter merged, in its own dtype, computed in float32."""
        change = adapters[self.up] @ adapters[self.down] * self.scaling
        change = change.T if self.is_transposed else change
        return (weight.float() + change).to(weight.dtype)


def inject_adapters(
    model: PreTrainedModel,
    config: AdapterConfig,
    *,
    model_name: str,
    head: str = "language_model",
    value_layer: str | None = None,
) -> None:
    """Add float32 adapters to linear layers of `model`, and freeze everything else.

    `all-linear` is every linear layer but the output layer and those that peft cannot adapt. What
    it leaves out is logged: experts above all, which are tensors of one module, and no layers. The
    score layer of a reward or value model stays trained, in float32.

    Args:
        model: On the meta device.
        config: Names the layers.
        model_name: Recorded in `adapter_config.json`.
        head: `language_model`, `reward` or `value`.
        value_layer: Name of the score layer; None for a language model.

    Raises:
        ValueError: An entry of `target_modules` matches no layer, or one that is not linear.
    """
    peft = _peft()
    _check_names(model, config.target_modules)
    targets = config.target_modules
    if targets == _ALL_LINEAR:
        targets = _linear_layers(model, value_layer)
        if not targets:
            raise ValueError(
                f"{_PATH}.target_modules={_ALL_LINEAR!r} matches no layer of {type(model).__name__}"
            )
    settings = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        # Peft sets it for each layer itself, but warns of every `Conv1D` where it is False.
        fan_in_fan_out=any(type(module) is Conv1D for module in model.modules()),
        base_model_name_or_path=model_name,
        # From the task peft's `all-linear` derives that the score layer gets no adapter.
        task_type="CAUSAL_LM" if value_layer is None else "SEQ_CLS",
    )
    try:
        peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise ValueError(
            f"{_PATH}.target_modules={config.target_modules!r} does not fit "
            f"{type(model).__name__}: {error}"
        ) from error
    settings.task_type = _TASKS[head]
    _check_layers(model, config.target_modules, value_layer)
    for layer in adapted_layers(model).values():
        # Peft creates them in the dtype of the layer.
        for factors in (layer.lora_A, layer.lora_B):
            factors.float()
    if value_layer is not None:
        settings.modules_to_save = [value_layer]
        model.get_submodule(value_layer).requires_grad_().float()


@torch.no_grad()
def fill_adapters(model: PreTrainedModel, config: AdapterConfig, *, seed: int) -> None:
    """Initialise this rank's shards of the adapters: A randomly, B with zeros; or load them.

    Collective. The values do not depend on the parallel layout. Files also hold the score layer.

    Raises:
        ValueError: `adapter_path` has no adapters, or adapters that do not match the policy's.
    """
    if config.adapter_path is not None:
        with failing_together():
            _read(model, Path(config.adapter_path))
        return
    # Every rank draws the full matrices, in one order, and keeps its shards.
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapters_of(dict(model.named_parameters())).items():
        full = torch.zeros(parameter.shape)
        if _DOWN in name:
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
        local_tensor(parameter).copy_(take(full, owned_indices(parameter)))


def trained_parameters(model: PreTrainedModel) -> Tensors:
    """Return the trained parameters of a model with adapters: those, and a score layer."""
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def adapters_of(state: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the adapters among the tensors of a model."""
    return {name: tensor for name, tensor in state.items() if _is_adapter(name)}


def without_adapters(state: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the other tensors, under their names in the model without adapters."""
    return {
        name.replace(_BASE, "."): tensor for name, tensor in state.items() if not _is_adapter(name)
    }


def adapted_layers(model: PreTrainedModel) -> dict[str, Any]:
    """Return the layers that have adapters, by their names."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def adapted_weights(model: PreTrainedModel) -> dict[str, AdaptedWeight]:
    """Return the weights that adapters change, by their names in the model without adapters."""
    return {
        f"{name}.weight": AdaptedWeight(
            down=f"{name}{_DOWN}weight",
            up=f"{name}{_UP}weight",
            scaling=layer.scaling["default"],
            is_transposed=layer.fan_in_fan_out,
        )
        for name, layer in adapted_layers(model).items()
    }


@contextmanager
def adapters_disabled(model: PreTrainedModel) -> Generator[None, None, None]:
    """Disable the adapters inside: the model is then the one that they were added to."""
    layers = adapted_layers(model).values()
    # Peft's `disable_adapters` also freezes the adapters, which FSDP would take for permanent.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def check_adapter_config(model: PreTrainedModel, path: Path, *, what: str) -> None:
    """Raise unless a directory's `adapter_config.json` matches the model's adapters.

    Raises:
        ValueError: A setting differs; the message names both values.
    """
    if not (path / _CONFIG_FILE).is_file():
        raise ValueError(f"{what}={str(path)!r} has no {_CONFIG_FILE}")
    own: Any = model.peft_config["default"]
    found = _peft().LoraConfig.from_pretrained(str(path))
    pairs = {key: (getattr(found, key), getattr(own, key)) for key in _MEANINGS}
    # Peft lists score layers of several architectures; only those of this model count.
    names = [name for name in found.modules_to_save or () if _is_layer(model, name)]
    pairs["modules_to_save"] = names, own.modules_to_save
    for key, (theirs, ours) in pairs.items():
        if theirs != ours and (theirs or ours):
            raise ValueError(f"{what}={str(path)!r} has {key}={theirs!r}, and the policy {ours!r}")


def save_adapter_config(model: PreTrainedModel, directory: Path) -> None:
    """Write `adapter_config.json`, as peft reads it."""
    model.peft_config["default"].save_pretrained(str(directory))


def write_peft_directory(model: PreTrainedModel, directory: Path, *, is_writer: bool) -> None:
    """Write the adapters as `peft.PeftModel.from_pretrained` reads them. Collective.

    Raises:
        RuntimeError: The writer could not write.
    """
    trained = trained_parameters(model)
    tensors = {_name_in_file(name): full_tensor(each).cpu() for name, each in trained.items()}
    with failing_together():
        if is_writer:
            save_file(tensors, directory / _FILE, metadata={"format": "pt"})
            save_adapter_config(model, directory)


def _read(model: PreTrainedModel, path: Path) -> None:
    if not (path / _FILE).is_file():
        raise ValueError(f"{_PATH}.adapter_path={str(path)!r} has no {_FILE}")
    check_adapter_config(model, path, what=f"{_PATH}.adapter_path")
    names = {
        _name_in_file(name): parameter for name, parameter in trained_parameters(model).items()
    }
    with SafetensorsFiles([str(path / _FILE)]) as files:
        if unlike := sorted(names.keys() ^ set(files.names)):
            raise ValueError(
                f"{_PATH}.adapter_path={str(path)!r} has adapters of other layers than "
                f"{_PATH}.target_modules: {len(unlike)} tensors differ, first {unlike[0]!r}"
            )
        for name, parameter in names.items():
            local_tensor(parameter).copy_(files.read(name, owned_indices(parameter)))


def _is_adapter(name: str) -> bool:
    return _DOWN in name or _UP in name


def _name_in_file(name: str) -> str:
    return _FILE_PREFIX + name.replace(".default.", ".")


def _check_names(model: PreTrainedModel, target_modules: list[str] | str) -> None:
    """Raise if an entry of `target_modules` matches no layer; peft only requires one match."""
    if isinstance(target_modules, str):
        return
    for target in target_modules:
        if not _is_layer(model, target):
            raise ValueError(
                f"{_PATH}.target_modules={target_modules!r}: {target!r} matches no layer of "
                f"{type(model).__name__}"
            )


def _is_layer(model: PreTrainedModel, ending: str) -> bool:
    return any(f".{name}".endswith(f".{ending}") for name, _ in model.named_modules())


def _linear_layers(model: PreTrainedModel, value_layer: str | None) -> list[str]:
    """Return the names of the layers that `all-linear` stands for, and log what it leaves out."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    output = model.get_output_embeddings()
    linear = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output and name != value_layer
    }
    # A layer of another class computes something else as well, as a router does.
    found = [name for name, kind in linear.items() if kind in _LINEAR_CLASSES]
    shared = _layers_with_shared_weights(model)
    found = [name for name in found if name not in shared]
    if model.config.model_type in _STATE_SPACE_MODELS:
        found = [name for name in found if name.rpartition(".")[2] not in _STATE_SPACE_LAYERS]
    # For mixtures of experts peft takes names such as `gate_proj` for the experts' tensors, also
    # where they are of a dense layer, so that it could not load an adapter of that.
    kept = _peft().LoraConfig(target_modules=found)
    convert_peft_config_for_transformers(kept, model, None)
    found = [name for name in found if name in kept.target_modules]
    # Experts have no layers of their own: a parameter holds the matrices of all.
    experts = {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and name.rpartition(".")[2] != "weight"
    }
    left_out = {_LAYER_NUMBER.sub(".*", name) for name in (linear.keys() - found) | experts}
    if left_out and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "%s.target_modules=%r leaves out %s of %s, which peft does not adapt as linear layers",
            _PATH,
            _ALL_LINEAR,
            sorted(left_out),
            type(model).__name__,
        )
    return found


def _layers_with_shared_weights(model: PreTrainedModel) -> set[str]:
    """Return the layers that have a weight in common with another.

    Each would get adapters of its own, and no one weight has them all merged.
    """
    tied = model.all_tied_weights_keys
    return {name.removesuffix(".weight") for pair in tied.items() for name in pair}


def _check_layers(
    model: PreTrainedModel, target_modules: list[str] | str, value_layer: str | None
) -> None:
    """Raise if peft has adapted a layer for which adapters are not supported."""
    output, shared = model.get_output_embeddings(), _layers_with_shared_weights(model)
    for name, layer in adapted_layers(model).items():
        if name in shared:
            raise ValueError(
                f"{_PATH}.target_modules={target_modules!r} matches {name}, whose weight "
                f"{class_name(model)} shares with another layer: leave it out"
            )
        is_last = layer is output or name == value_layer
        if type(layer.base_layer).__name__ not in _LINEAR_CLASSES or is_last:
            raise ValueError(
                f"{_PATH}.target_modules={target_modules!r} matches {name}: adapters are "
                "supported on linear layers only, and not on the output layer"
            )


def _peft() -> Any:
    """Return peft, untyped: some of its annotations are wrong. `require_peft` came first."""
    import peft

    return peft
