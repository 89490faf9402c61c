"""Low-rank adapters: `W + scaling * B @ A` for some weights W, of which A and B are trained.

The layers, their names and their files are peft's, which is imported where adapters are asked for.
A weight keeps the name and the place that it has in the model without adapters for whoever reads,
sends or exports it; those who step or save what is trained see the adapters alone.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rl_interfaces.backend.checkpoint.safetensors_files import SafetensorsFiles, take
from rl_interfaces.backend.runtime.agreement import failing_together
from safetensors.torch import save_file
from torch import nn

from rl_dtensor_worker.model.sharded_indices import owned_indices
from rl_dtensor_worker.parallel.fsdp import full_tensor, local_tensor

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from rl_dtensor_worker.config import AdapterConfig

Tensors = dict[str, torch.Tensor]

_PATH = "policy.dtensor_cfg.lora"
_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.", ".lora_B.default."
_CONFIG_FILE, _FILE = "adapter_config.json", "adapter_model.safetensors"
_FILE_PREFIX = "base_model.model."
# What an adapter's numbers mean; of these, a directory must say what the policy says.
_MEANINGS = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
_MEANINGS += ("use_dora", "lora_bias", "bias", "target_parameters")
_TASKS = {"language_model": "CAUSAL_LM", "reward": "SEQ_CLS", "value": "TOKEN_CLS"}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedWeight:
    """A weight that an adapter changes."""

    down: str
    """Name of A, `[r, inputs]`."""
    up: str
    """Name of B, `[outputs, r]`."""
    scaling: float

    def merge(self, weight: torch.Tensor, adapters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return `weight` as the adapter changes it, in its own dtype, computed in float32."""
        change = adapters[self.up] @ adapters[self.down] * self.scaling
        return (weight.float() + change).to(weight.dtype)


def inject_adapters(
    model: nn.Module,
    config: AdapterConfig,
    *,
    model_name: str,
    head: str = "language_model",
    value_layer: str | None = None,
) -> None:
    """Give some linear layers of `model`, which is on the meta device, adapters in float32.

    Afterwards nothing else of it is trained but `value_layer`, whole and in float32, too: the layer
    that makes the scores of a reward or value model (`head`).

    Raises:
        ImportError: peft is not installed.
        ValueError: `target_modules` names what is not there, or what is no linear layer.
    """
    peft = _peft()
    _check_names(model, config.target_modules)
    settings = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=config.target_modules,
        base_model_name_or_path=model_name,
        # Of the task, `all-linear` takes that a layer of scores has no adapter.
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
        # Peft gives them the dtype of the layer.
        for factors in (layer.lora_A, layer.lora_B):
            factors.float()
    if value_layer is not None:
        settings.modules_to_save = [value_layer]
        model.get_submodule(value_layer).requires_grad_().float()


@torch.no_grad()
def fill_adapters(model: nn.Module, config: AdapterConfig, *, seed: int) -> None:
    """Fill this rank's shards of the adapters: A at random and B with zeros, or from files.

    Collective. Every layout of ranks gets the same ones. Files have a layer of scores, too.

    Raises:
        ValueError: `adapter_path` has no adapters, or others than the policy's.
    """
    if config.adapter_path is not None:
        with failing_together():
            _read(model, Path(config.adapter_path))
        return
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapters_of(dict(model.named_parameters())).items():
        whole = torch.zeros(parameter.shape)
        if _DOWN in name:
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        local_tensor(parameter).copy_(take(whole, owned_indices(parameter)))


def trained_beside(model: nn.Module) -> Tensors:
    """Return what is trained of a model with adapters: those, and a layer of scores."""
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def adapters_of(state: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the adapters among the tensors of a model."""
    return {name: tensor for name, tensor in state.items() if _is_adapter(name)}


def without_adapters(state: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the other tensors, under the names that they have in the model without adapters."""
    return {
        name.replace(_BASE, "."): tensor for name, tensor in state.items() if not _is_adapter(name)
    }


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that have adapters, by their names."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def adapted_weights(model: nn.Module) -> dict[str, AdaptedWeight]:
    """Return the weights that adapters change, by their names in the model without adapters."""
    return {
        f"{name}.weight": AdaptedWeight(
            down=f"{name}{_DOWN}weight", up=f"{name}{_UP}weight", scaling=layer.scaling["default"]
        )
        for name, layer in adapted_layers(model).items()
    }


class AdaptersOff:
    """The reference of a policy of adapters, which is the model without them."""

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Generator[None, None, None]:
        """Leave the adapters out of the forwards inside."""
        layers = adapted_layers(model).values()
        # Peft's own switch freezes the adapters too, which FSDP would keep in mind.
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False


def check_adapter_config(model: Any, path: Path, *, what: str) -> None:
    """Raise unless a directory's `adapter_config.json` says of adapters what the model's says.

    Raises:
        ValueError: It differs in what the numbers mean; the message names both.
    """
    if not (path / _CONFIG_FILE).is_file():
        raise ValueError(f"{what}={str(path)!r} has no {_CONFIG_FILE}")
    found, own = _peft().LoraConfig.from_pretrained(str(path)), model.peft_config["default"]
    pairs = {key: (getattr(found, key), getattr(own, key)) for key in _MEANINGS}
    # Peft names the layers that a model could have.
    names = [name for name in found.modules_to_save or () if _is_layer(model, name)]
    pairs["modules_to_save"] = names, own.modules_to_save
    for key, (theirs, ours) in pairs.items():
        if theirs != ours and (theirs or ours):
            raise ValueError(f"{what}={str(path)!r} has {key}={theirs!r}, and the policy {ours!r}")


def save_adapter_config(model: Any, directory: Path) -> None:
    """Write `adapter_config.json`, as peft reads it."""
    model.peft_config["default"].save_pretrained(str(directory))


def write_peft_directory(model: Any, directory: Path, *, is_writer: bool) -> None:
    """Write the adapters as `peft.PeftModel.from_pretrained` reads them. Collective.

    Raises:
        RuntimeError: The writer could not write.
    """
    trained = trained_beside(model)
    tensors = {_name_in_file(name): full_tensor(each).cpu() for name, each in trained.items()}
    with failing_together():
        if is_writer:
            save_file(tensors, directory / _FILE, metadata={"format": "pt"})
            save_adapter_config(model, directory)


def _read(model: Any, path: Path) -> None:
    if not (path / _FILE).is_file():
        raise ValueError(f"{_PATH}.adapter_path={str(path)!r} has no {_FILE}")
    check_adapter_config(model, path, what=f"{_PATH}.adapter_path")
    names = {_name_in_file(name): parameter for name, parameter in trained_beside(model).items()}
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


def _check_names(model: nn.Module, target_modules: list[str] | str) -> None:
    """Raise where a name of a list is no layer's; peft takes it that one of them suffices."""
    if isinstance(target_modules, str):
        return
    for target in target_modules:
        if not _is_layer(model, target):
            raise ValueError(
                f"{_PATH}.target_modules={target_modules!r}: {target!r} is no layer of "
                f"{type(model).__name__}"
            )


def _is_layer(model: nn.Module, ending: str) -> bool:
    return any(f".{name}".endswith(f".{ending}") for name, _ in model.named_modules())


def _check_layers(
    model: nn.Module, target_modules: list[str] | str, value_layer: str | None
) -> None:
    """Raise where a layer that cannot have adapters has got some."""
    output = model.get_output_embeddings()  # type: ignore[operator]
    for name, layer in adapted_layers(model).items():
        is_last = layer is output or name == value_layer
        if type(layer.base_layer) is not nn.Linear or is_last:
            raise ValueError(
                f"{_PATH}.target_modules={target_modules!r} takes in {name}: only linear "
                "layers can have adapters here, and the output layer cannot"
            )


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ImportError(
            f"{_PATH}.enabled=True needs peft, which is not installed. Install it with: "
            'pip install "rl-dtensor-worker[lora]"'
        ) from error
    return peft
