"""Lookup of converters by `model_type`: built in, registered, or from entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rl_megatron_worker.convert.families import CONVERTERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rl_megatron_worker.convert.mappings import Mapping
    from rl_megatron_worker.model.config import Architecture

ENTRY_POINT_GROUP = "rl_megatron_worker.converters"
"""Each entry is a `Converter`, named after the `model_type` that it converts."""

_registered: dict[str, Converter] = {}


class Converter(Protocol):
    """Converts a family of models to Megatron-core."""

    def architecture(self, hf_config: PreTrainedConfig) -> Architecture:
        """Return the Megatron-core architecture of a Hugging Face config.

        Raises:
            ValueError: `GPTModel` would compute other numbers under a setting of the config.
        """
        ...

    def mappings(self, architecture: Architecture) -> list[Mapping]:
        """Return the mapping of every parameter, in the order of export."""
        ...


def register_converter(model_type: str, converter: Converter) -> None:
    """Register a converter for `model_type`; it takes precedence over any other."""
    _registered[model_type] = converter


def known_converters() -> list[str]:
    """Return the names of all converters, sorted."""
    installed = (entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))
    return sorted({*CONVERTERS, *_registered, *installed})


def converter_for(hf_config: PreTrainedConfig, converter_type: str = "auto") -> Converter:
    """Return the converter of a model.

    Args:
        hf_config: The model's config.
        converter_type: `policy.megatron_cfg.converter_type`: the name of a converter, or of a
            class in transformers, as "Qwen2ForCausalLM", which is for models that have no converter
            of their own; "auto" is the config's `model_type`.

    Raises:
        ValueError: There is no such converter.
    """
    if names_another_class(hf_config, converter_type):
        converter_type = "auto"
    is_auto = converter_type == "auto"
    name = hf_config.model_type if is_auto else converter_type
    for candidate in [name, *_model_types(name, hf_config.model_type)]:
        if (converter := _find(candidate)) is not None:
            return converter
    asked = (
        f"policy.model_name={hf_config.name_or_path!r} is a {name!r} model"
        if is_auto
        else f"policy.megatron_cfg.converter_type={name!r}"
    )
    raise ValueError(
        f"{asked}, for which there is no converter to Megatron-core (available: "
        f"{', '.join(known_converters())}); register another one as an entry point of "
        f"{ENTRY_POINT_GROUP!r}"
    )


def names_another_class(hf_config: PreTrainedConfig, converter_type: str) -> bool:
    """Return whether a class of other models is named, and the model has a converter of its own.

    NeMo RL's files name the class of the file that they started from, which has no effect there.
    """
    own = hf_config.model_type
    types = _model_types(converter_type, own)
    return bool(types) and own not in types and _find(own) is not None


def _model_types(class_name: str, own: str) -> list[str]:
    """Return the types of the models of a class; several may share one, of which `own` is first."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    types = [model_type for model_type, name in classes if name == class_name]
    return sorted(types, key=lambda model_type: model_type != own)


def _find(name: str) -> Converter | None:
    if name in _registered:
        return _registered[name]
    entries = entry_points(group=ENTRY_POINT_GROUP, name=name)
    if len(entries) > 1:
        packages = sorted(entry.dist.name for entry in entries if entry.dist is not None)
        raise ValueError(f"{' and '.join(packages)} both convert {name!r} to Megatron-core")
    for entry in entries:
        return entry.load()
    return CONVERTERS.get(name)
