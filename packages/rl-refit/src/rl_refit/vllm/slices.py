"""The slices that a worker consumes of the trainer's tensors, and their way into vLLM's parameters.

vLLM's loader runs once on tensors without values, and on parameters as they are before vLLM
processes them. What it takes in slices arrives in places beside the weights that serve, in host
memory; once everything is verified, each parameter is loaded as a whole by vLLM's layerwise reload,
which fuses, packs and copies it as ever. What the loader computes with arrives in full.
"""

# vLLM is not installed where this is checked.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from rl_refit.errors import RefitError
from rl_refit.resharding.consumers import record
from rl_refit.resharding.messages import Want
from rl_refit.resharding.slices import Box
from rl_refit.source import WeightMeta
from rl_refit.vllm.staging import own_metadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces_base import VllmModel

    from rl_refit.vllm.reload import LayerwiseReload


class SlicedModel:
    """Places for what one worker consumes.

    Args:
        config: The engine's.

    Raises:
        RefitError: The engine is quantised or serves adapters.
    """

    def __init__(self, config: VllmConfig) -> None:
        if reason := _why_unsupported(config):
            raise RefitError(f"slices cannot be loaded: {reason}; send tensors")
        self._metadata: list[WeightMeta] | None = None
        self._wants: list[Want] = []
        self._parameters: dict[str, torch.Tensor] = {}
        self._full: dict[str, torch.Tensor] = {}

    def wanted(self, model: VllmModel, metadata: Sequence[WeightMeta]) -> list[Want]:
        """Return what this worker wants of the trainer's tensors.

        Args:
            model: Its loader is run, and its weights do not change; no forward pass may run.
            metadata: Name, dtype and full shape of the tensors.
        """
        if self._metadata != list(metadata):
            self._make_places(model, metadata)
            self._metadata = list(metadata)
        return self._wants

    def load(self, reload: LayerwiseReload) -> None:
        """Load what has arrived; `reload.complete` reports what is missing."""
        if self._full:
            reload.load(list(self._full.items()))
        reload.load_parameters(self._parameters)

    def _make_places(self, model: VllmModel, metadata: Sequence[WeightMeta]) -> None:
        with _as_loaded(model) as targets:
            found = record(model.load_weights, metadata, targets).of_complete_parameters()
            self._parameters = {
                name: torch.zeros_like(targets[name], device="cpu")
                for name in {each.target for each in found.slices}
            }
            for name, place in self._parameters.items():
                assert place.stride() == targets[name].stride(), name
        self._full = {
            each.name: torch.zeros(each.shape, dtype=each.dtype)
            for each in metadata
            if each.name in found.full
        }
        self._wants = [each.want(self._parameters) for each in found.slices] + [
            Want(name, tuple(tensor.shape), Box.full(tuple(tensor.shape)), tensor)
            for name, tensor in self._full.items()
        ]


def _why_unsupported(config: VllmConfig) -> str:
    if config.model_config.quantization is not None:
        return f"the model is quantised ({config.model_config.quantization})"
    return "the engine serves adapters" if config.lora_config is not None else ""


@contextmanager
def _as_loaded(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Give a model's layers the tensors that vLLM loads, without memory; yield these by name.

    After the block they have their own again.
    """
    kept = [(vars(layer), _containers(layer)) for layer in model.modules()]
    targets: dict[str, torch.Tensor] = {}
    try:
        for prefix, layer in model.named_modules():
            own = own_metadata(get_layerwise_info(layer).restore_metadata, layer, layer)
            for container, tensors in zip(("_parameters", "_buffers"), own, strict=True):
                live = vars(layer)[container]
                skipped = {name: live[name] for name in live if name in SKIP_TENSORS}
                vars(layer)[container] = {**tensors, **skipped}
                found = {f"{prefix}.{name}": each for name, each in vars(layer)[container].items()}
                targets |= {name: each for name, each in found.items() if each is not None}
        yield targets
    finally:
        for attributes, containers in kept:
            attributes |= containers


def _containers(layer: torch.nn.Module) -> dict[str, dict[str, torch.Tensor | None]]:
    return {name: vars(layer)[name] for name in ("_parameters", "_buffers")}
