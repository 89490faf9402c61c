"""Load a checkpoint into a sharded model: each rank reads its own slices."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_interfaces.backend.checkpoint.hf_files import SafetensorsFiles, find_checkpoint
from rl_interfaces.backend.runtime import failing_together, first_rank_first
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from rl_dtensor_worker.model.convert import Conversion, plan_conversions
from rl_dtensor_worker.model.lora import without_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_dtensor_worker.config import EngineConfig

logger = logging.getLogger(__name__)

_BY_HEAD: dict[str, Any] = {
    "reward": AutoModelForSequenceClassification,
    "value": AutoModelForTokenClassification,
}


def auto_class(head: str, model_config: Any) -> Any:
    """Return the `AutoModel...` class for a head and the architecture that a config names.

    Args:
        head: `policy.head`.
        model_config: The model's transformers config.
    """
    if head in _BY_HEAD:
        return _BY_HEAD[head]
    with_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_config.model_type)
    if with_images in (model_config.architectures or ()):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


class ModelLoader:
    """Loads the checkpoint `policy.model_name` into the shards of a model. Collective.

    Args:
        model: The model as transformers builds it, unsharded and on the meta device. Weights that
            its config ties but the checkpoint holds with different values are untied here.
        config: The worker's config.

    Raises:
        ValueError: The checkpoint lacks tensors of the model, has them in other shapes, or is not
            in safetensors while adapters are enabled.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self._buffers = initial_buffers(model)
        paths = first_rank_first(lambda: find_checkpoint(config.model_name, model.config))
        self._pretrained: PreTrainedModel | None = None
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
            untie_different_weights(model, self._conversions, self._files)

    def fill(self, model: PreTrainedModel, *, device: torch.device) -> None:
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


def untie_different_weights(
    model: PreTrainedModel, conversions: list[Conversion], files: SafetensorsFiles
) -> None:
    """Untie weights that the config ties but the files hold with different values, and warn.

    As `from_pretrained` does. If the values are equal, the second copy is not read.
    """
    by_name = {each.name: each for each in conversions if each.converter is None}
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in by_name or source not in by_name:
            continue
        if files.equal(by_name[target].only_source(), by_name[source].only_source()):
            conversions.remove(by_name[target])
            continue
        logger.warning(
            "the model's config ties %s to %s, but the checkpoint holds different values for "
            "them: they are not tied",
            target,
            source,
        )
        module_name, _, attribute = target.rpartition(".")
        tied = model.get_parameter(target)
        setattr(model.get_submodule(module_name), attribute, type(tied)(torch.empty_like(tied)))
        del model.all_tied_weights_keys[target]


def initial_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return every buffer as the model initialises it, on the CPU.

    Checkpoints do not hold all of them: rotary frequencies, for example, are not persistent.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
    return {n: buffer.clone() for n, buffer in model.named_buffers(remove_duplicate=False)}


def _load_on_first_rank(
    model: PreTrainedModel, config: EngineConfig, path: str
) -> PreTrainedModel | None:
    """Return the unsharded model on the first rank, None on the others. Collective."""
    if dist.get_rank() == 0:
        logger.warning(
            "%s is not a safetensors file: the first rank loads the full model in float32 and "
            "sends the others their shards",
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


def _broadcast_weights(model: PreTrainedModel, pretrained: PreTrainedModel | None) -> None:
    """Fill `model`'s shards from the first rank's `pretrained`. Collective."""
    set_model_state_dict(
        model,
        {} if pretrained is None else pretrained.state_dict(),
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
