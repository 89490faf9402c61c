"""Several sets of adapters on one model: one is in the model, the others in host memory.

A set has adapters, gradients and optimizer state of its own. All sets share the layers and the rank
`r` of the model's adapters. A set of a lower rank fills the rest of A and B with zeros, and a layer
that it does not train has zeros in both. Their gradients are then exactly zero:

    y = scaling * B @ A @ x:   dA = scaling * B^T dy x^T,   dB = scaling * dy (A x)^T

As Adam leaves a parameter at zero whose gradients are all zero, the set trains as it would in a
model that has its rank and layers only.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rl_interfaces.backend.accumulation import PendingGradients
from rl_interfaces.backend.checkpoint.hf_files import SafetensorsFiles, take
from rl_interfaces.backend.runtime import failing_together
from safetensors.torch import save_file
from torch import nn

from rl_dtensor_worker.model.lora import adapted_layers, trained_parameters
from rl_dtensor_worker.parallel.fsdp import full_tensor, local_tensor, owned_indices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"
_WEIGHTS, _MOMENTS = "adapter_model.safetensors", "optimizer.safetensors"
_PEFT_CONFIG, _SET_CONFIG = "adapter_config.json", "adapter_set.json"
_FILE_PREFIX = "base_model.model."
_STEP = "step"
ATTENTION, MLP = "attention", "mlp"
"""The kinds of layers that a set may train."""
_ATTENTION_WORDS = ("attn", "attention")

State = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSetConfig:
    """What a set trains."""

    rank: int
    """At most `policy.dtensor_cfg.lora.r`."""
    seed: int
    """Of the initial A; B is zero."""
    layers: tuple[str, ...] = (ATTENTION, MLP)
    """Kinds of layers: `attention`, `mlp` (all others that have adapters)."""


@dataclass(kw_only=True, slots=True)
class AdapterSet:
    """This rank's shards of one set, in host memory while another set is in the model."""

    config: AdapterSetConfig | None
    """None: the set of zeros, which leaves the model as it is without adapters."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    moments: State = field(default_factory=dict[str, dict[str, torch.Tensor]])
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    pending: PendingGradients = field(default_factory=PendingGradients)


class AdapterSets:
    """The sets of adapters of one model, by name.

    Every method is called on every rank.

    Args:
        model: With adapters, and without a score layer.
        optimizer: Over the adapters.
        rank: The rank of the adapters in the model, at least that of every set.
        alpha: A set's adapters are scaled by `alpha / rank of the set`.
    """

    def __init__(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, *, rank: int, alpha: float
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._rank = rank
        self._alpha = alpha
        self._layers: dict[str, Any] = adapted_layers(model)
        # In the model until the first `use`: what the policy was built with.
        self._current = AdapterSet(config=None)
        self._sets: dict[str, AdapterSet] = {}
        self._base = AdapterSet(config=None)

    def create(self, name: str, config: AdapterSetConfig) -> None:
        """Add a set with initial adapters: A as peft draws it, B zero. It is not in the model yet.

        Raises:
            ValueError: The name is taken, or the config does not fit the model.
        """
        self._require_new(name)
        self._check(config)
        self._sets[name] = AdapterSet(config=config, weights=self._initial(config))

    def use(self, name: str | None, pending: PendingGradients) -> PendingGradients:
        """Put a set into the model, and the one that is there into host memory.

        Args:
            name: The set; None: zeros, the model without adapters.
            pending: The counts of the gradients that the model has.

        Returns:
            The counts of the gradients that it has then.

        Raises:
            ValueError: There is no set of that name.
        """
        chosen = self._base if name is None else self._find(name)
        if chosen is self._current:
            return pending
        self._leave(pending)
        self._enter(chosen)
        return chosen.pending

    def copy(self, name: str) -> None:
        """Add a set with the adapters of the one in the model, without optimizer and gradients.

        Raises:
            ValueError: The name is taken, or the model has no set.
        """
        self._require_new(name)
        config = self._own_config()
        weights = {key: local_tensor(each).cpu().clone() for key, each in self._parameters()}
        self._sets[name] = AdapterSet(config=config, weights=weights)

    def remove(self, name: str, pending: PendingGradients) -> PendingGradients:
        """Drop a set; the model has zeros if it was there.

        Returns:
            As `use`.

        Raises:
            ValueError: There is no set of that name.
        """
        if self._find(name) is self._current:
            pending = self.use(None, pending)
        del self._sets[name]
        return pending

    # Files

    def save(self, path: Path, *, with_optimizer: bool, is_writer: bool) -> None:
        """Write the set in the model as peft reads it, at its own rank. Collective.

        Args:
            path: An existing directory.
            with_optimizer: Write the optimizer state beside it.
            is_writer: Whether this rank writes.

        Raises:
            ValueError: The model has no set.
            RuntimeError: The writer could not write.
        """
        config = self._own_config()
        weights: dict[str, torch.Tensor] = {}
        moments: dict[str, torch.Tensor] = {}
        for key, parameter in self._trained(config):
            weights[_name_in_file(key)] = _unpadded(full_tensor(parameter).cpu(), key, config)
            state = self._optimizer.state.get(parameter, {}) if with_optimizer else {}
            for kind, value in state.items():
                full = full_tensor(value).cpu()
                moments[f"{key}:{kind}"] = full if kind == _STEP else _unpadded(full, key, config)
        with failing_together():
            if is_writer:
                save_file(weights, path / _WEIGHTS, metadata={"format": "pt"})
                self._write_peft_config(config, path)
                (path / _SET_CONFIG).write_text(json.dumps(asdict(config)))
                if with_optimizer:
                    save_file(moments, path / _MOMENTS)

    def load(self, name: str, path: Path, *, with_optimizer: bool) -> None:
        """Add the set that `save` wrote; it is not in the model yet.

        Raises:
            ValueError: The name is taken, or the directory does not fit the model.
        """
        self._require_new(name)
        with failing_together():
            config = _read_config(path)
            self._check(config)
            found = AdapterSet(config=config, weights=self._zeros())
            parameters = dict(self._trained(config))
            with SafetensorsFiles([str(path / _WEIGHTS)]) as files:
                _require_same(path, files.names, map(_name_in_file, parameters))
                for key, parameter in parameters.items():
                    found.weights[key] = _read_padded(files, _name_in_file(key), parameter)
            if with_optimizer:
                found.moments = self._read_moments(path, parameters)
            self._sets[name] = found

    def _read_moments(self, path: Path, parameters: dict[str, nn.Parameter]) -> State:
        if not (path / _MOMENTS).is_file():
            raise ValueError(f"{path} has no optimizer state: it was saved without")
        moments: State = {}
        with SafetensorsFiles([str(path / _MOMENTS)]) as files:
            for entry in files.names:
                key, _, kind = entry.rpartition(":")
                if key not in parameters:
                    raise ValueError(f"{path}: the optimizer state has {key!r}, the model has not")
                value = (
                    files.read(entry, [])
                    if kind == _STEP
                    else _read_padded(files, entry, parameters[key])
                )
                moments.setdefault(key, {})[kind] = value
        return moments

    # The model's adapters

    def _leave(self, pending: PendingGradients) -> None:
        """Copy adapters, optimizer state and gradients of the current set to host memory."""
        current = self._current
        current.pending = pending
        current.weights, current.moments, current.gradients = {}, {}, {}
        for key, parameter in self._parameters():
            if current is not self._base:
                current.weights[key] = local_tensor(parameter).cpu().clone()
            state = self._optimizer.state.pop(parameter, {})
            if state:
                current.moments[key] = {k: local_tensor(v).cpu() for k, v in state.items()}
            if parameter.grad is not None:
                current.gradients[key] = local_tensor(parameter.grad).cpu()
                parameter.grad = None

    @torch.no_grad()
    def _enter(self, chosen: AdapterSet) -> None:
        (group,) = self._optimizer.param_groups
        for key, parameter in self._parameters():
            local = local_tensor(parameter)
            if chosen.weights:
                local.copy_(chosen.weights[key])
            else:
                local.zero_()
            if key in chosen.moments:
                step_device = _step_device(parameter, group)
                self._optimizer.state[parameter] = {
                    kind: value.to(step_device) if kind == _STEP else _like(parameter, value)
                    for kind, value in chosen.moments[key].items()
                }
            if key in chosen.gradients:
                parameter.grad = _like(parameter, chosen.gradients[key])
        scaling = 1.0 if chosen.config is None else self._alpha / chosen.config.rank
        for layer in self._layers.values():
            layer.scaling["default"] = scaling
        # The model now has the only copy: another one on the host would double the set's memory.
        chosen.weights, chosen.moments, chosen.gradients = {}, {}, {}
        self._current = chosen

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for key, parameter in trained_parameters(self._model).items():
            assert isinstance(parameter, nn.Parameter)
            yield key, parameter

    def _trained(self, config: AdapterSetConfig) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the layers that a set trains."""
        for key, parameter in self._parameters():
            if kind_of_layer(key) in config.layers:
                yield key, parameter

    def _zeros(self) -> dict[str, torch.Tensor]:
        return {
            key: torch.zeros_like(local_tensor(p), device="cpu") for key, p in self._parameters()
        }

    def _initial(self, config: AdapterSetConfig) -> dict[str, torch.Tensor]:
        """Return this rank's shards of new adapters. The values do not depend on the layout."""
        weights = self._zeros()
        generator = torch.Generator().manual_seed(config.seed)
        for key, parameter in self._trained(config):
            if not key.endswith(_DOWN):
                continue
            # Drawn at the set's own rank: the numbers are those of a model of that rank.
            own = torch.empty(config.rank, parameter.shape[1])
            nn.init.kaiming_uniform_(own, a=math.sqrt(5), generator=generator)
            full = torch.zeros(parameter.shape)
            full[: config.rank] = own
            weights[key].copy_(take(full, owned_indices(parameter)))
        return weights

    def _write_peft_config(self, config: AdapterSetConfig, path: Path) -> None:
        peft: Any = self._model.peft_config["default"]
        before = peft.r, peft.lora_alpha, peft.target_modules
        peft.r, peft.lora_alpha = config.rank, self._alpha
        peft.target_modules = {
            name for name in self._layers if kind_of_layer(name) in config.layers
        }
        try:
            peft.save_pretrained(str(path))
        finally:
            peft.r, peft.lora_alpha, peft.target_modules = before

    # Checks

    def _own_config(self) -> AdapterSetConfig:
        if self._current.config is None:
            raise ValueError("the model has no set of adapters: call use_adapters first")
        return self._current.config

    def _find(self, name: str) -> AdapterSet:
        if name not in self._sets:
            raise ValueError(
                f"there is no set of adapters {name!r}: there are {sorted(self._sets)}"
            )
        return self._sets[name]

    def _require_new(self, name: str) -> None:
        if name in self._sets:
            raise ValueError(f"there is a set of adapters {name!r} already")

    def _check(self, config: AdapterSetConfig) -> None:
        if not 1 <= config.rank <= self._rank:
            raise ValueError(
                f"rank={config.rank} is not within 1..{self._rank}, policy.dtensor_cfg.lora.r"
            )
        kinds = {kind_of_layer(name) for name in self._layers}
        if not kinds & set(config.layers):
            raise ValueError(
                f"layers={list(config.layers)} are none of the model's {sorted(kinds)}"
            )


def kind_of_layer(name: str) -> str:
    """Return `attention` or `mlp` for the name of a layer, or of one of its parameters.

    Example: `model.layers.0.self_attn.q_proj` -> `attention`
    """
    parts = name.split(".")
    return ATTENTION if any(word in part for part in parts for word in _ATTENTION_WORDS) else MLP


def _like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the parameter's kind and layout whose local shard is `local`."""
    full = torch.zeros_like(parameter, requires_grad=False)
    local_tensor(full).copy_(local)
    return full


def _step_device(parameter: nn.Parameter, group: dict[str, Any]) -> torch.device:
    """Return where AdamW has the number of steps: a fused kernel reads it on the device."""
    is_on_device = group["fused"] or group["capturable"]
    return parameter.device if is_on_device else torch.device("cpu")


def _unpadded(full: torch.Tensor, key: str, config: AdapterSetConfig) -> torch.Tensor:
    own = full[: config.rank] if key.endswith(_DOWN) else full[:, : config.rank]
    return own.contiguous()


def _read_padded(files: SafetensorsFiles, name: str, parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's shard of a tensor that is stored at the set's own rank."""
    stored = files.read(name, [torch.arange(size) for size in files.shape(name)])
    full = torch.zeros(parameter.shape)
    full[: stored.shape[0], : stored.shape[1]] = stored
    return take(full, owned_indices(parameter))


def _read_config(path: Path) -> AdapterSetConfig:
    for name in (_WEIGHTS, _SET_CONFIG):
        if not (path / name).is_file():
            raise ValueError(f"{path} has no {name}: it is no saved set of adapters")
    found = json.loads((path / _SET_CONFIG).read_text())
    return AdapterSetConfig(rank=found["rank"], seed=found["seed"], layers=tuple(found["layers"]))


def _require_same(path: Path, found: Sequence[str], wanted: Iterator[str]) -> None:
    if unlike := sorted(set(found) ^ set(wanted)):
        raise ValueError(
            f"{path} has adapters of other layers than the model: {len(unlike)} tensors differ, "
            f"first {unlike[0]!r}"
        )


def _name_in_file(key: str) -> str:
    return _FILE_PREFIX + key.replace(".default.", ".")
