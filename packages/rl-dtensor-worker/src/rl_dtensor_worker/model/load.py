"""From a checkpoint on disk into the shards of a model: each rank reads its own slices."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rl_interfaces.backend.checkpoint.hub_files import find_checkpoint
from rl_interfaces.backend.checkpoint.safetensors_files import SafetensorsFiles
from rl_interfaces.backend.runtime.agreement import failing_together, first_rank_first
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from rl_dtensor_worker.model.classes import auto_class
from rl_dtensor_worker.model.convert import Conversion, plan_conversions
from rl_dtensor_worker.model.lora import without_adapters

if TYPE_CHECKING:
    from torch import nn

    from rl_dtensor_worker.config import WorkerConfig

logger = logging.getLogger(__name__)


class ModelLoader:
    """Fills the shards of a model from the checkpoint that it is named after. Collective.

    Args:
        model: The model as transformers builds it, whole and on the meta device. Where its config
            ties weights that the checkpoint holds with unlike values, they are untied here.
        config: Names the model.

    Raises:
        ValueError: The checkpoint lacks tensors of the model, has them in other shapes, or is in a
            format that adapters cannot be put on.
    """

    def __init__(self, model: nn.Module, config: WorkerConfig) -> None:
        self._buffers = initial_buffers(model)
        paths = first_rank_first(lambda: find_checkpoint(config.model_name, model.config))
        self._pretrained: nn.Module | None = None
        self._files: SafetensorsFiles | None = None
        if not paths[0].endswith(".safetensors"):
            if config.adapters is not None:
                raise ValueError(
                    "policy.dtensor_cfg.lora.enabled=True needs a checkpoint in safetensors, and "
                    f"policy.model_name={config.model_name!r} has {paths[0]!r}"
                )
            self._pretrained = _load_on_first_rank(model, config, paths[0])
            return
        with failing_together():
            self._files = SafetensorsFiles(paths)
            self._conversions = plan_conversions(model, self._files, config.model_name)
            untie_what_differs(model, self._conversions, self._files)

    def fill(self, model: nn.Module, *, device: torch.device) -> None:
        """Fill every parameter and buffer of the sharded `model`, in place. Collective."""
        for name, buffer in model.named_buffers(remove_duplicate=False):
            buffer.data = self._buffers[name].to(device)
        if self._files is None:
            _broadcast_weights(model, self._pretrained)
            self._pretrained = None
            return
        with failing_together(), self._files:
            state = without_adapters(model.state_dict())
            for conversion in self._conversions:
                conversion.fill(model, state, self._files)


def untie_what_differs(
    model: nn.Module, conversions: list[Conversion], files: SafetensorsFiles
) -> None:
    """Untie what the config ties and the files hold twice, with unlike values; warn of it.

    As `from_pretrained` does it. The copy of a pair with equal values is read once.
    """
    by_name = {each.name: each for each in conversions if each.converter is None}
    for target, source in list(model.all_tied_weights_keys.items()):  # type: ignore[union-attr]
        if target not in by_name or source not in by_name:
            continue
        if files.equal(by_name[target].only_source(), by_name[source].only_source()):
            conversions.remove(by_name[target])
            continue
        logger.warning(
            "the model's config ties %s to %s, and the checkpoint holds unlike values for them: "
            "they are not tied",
            target,
            source,
        )
        module_name, _, attribute = target.rpartition(".")
        tied = model.get_parameter(target)
        setattr(model.get_submodule(module_name), attribute, type(tied)(torch.empty_like(tied)))
        del model.all_tied_weights_keys[target]  # type: ignore[union-attr, operator]


def initial_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every buffer as the model's own initialisation makes it, on the CPU.

    For what a checkpoint does not hold, such as the frequencies of rotary embeddings.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()  # type: ignore[operator]
    return {n: buffer.clone() for n, buffer in model.named_buffers(remove_duplicate=False)}


def _load_on_first_rank(model: nn.Module, config: WorkerConfig, path: str) -> nn.Module | None:
    """Return the whole model on the first rank, None on the others. Collective."""
    if dist.get_rank() == 0:
        logger.warning(
            "%s is no safetensors file: the first rank loads the whole model in float32 and sends "
            "the others their shards",
            path,
        )
    with failing_together():
        if dist.get_rank() > 0:
            return None
        return auto_class(config.head, model.config).from_pretrained(
            config.model_name,
            config=model.config,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
        )


def _broadcast_weights(model: nn.Module, pretrained: nn.Module | None) -> None:
    """Fill `model`'s shards from the first rank's `pretrained`. Collective."""
    set_model_state_dict(
        model,
        {} if pretrained is None else pretrained.state_dict(),
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
