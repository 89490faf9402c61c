"""Converters by `model_type`: our own, and those of others."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from rl_megatron_worker.convert.families import CONVERTERS

if TYPE_CHECKING:
    from rl_megatron_worker.convert.mappings import Mapping
    from rl_megatron_worker.model.architecture import Architecture

ENTRY_POINT_GROUP = "rl_megatron_worker.converters"
"""Each entry is a `Converter`, named after the `model_type` that it converts."""

_registered: dict[str, Converter] = {}


class Converter(Protocol):
    """Says a family of models in Megatron-core's terms."""

    def architecture(self, hf_config: Any) -> Architecture:
        """Return the model that a Hugging Face config describes.

        Raises:
            ValueError: It has a setting with which `GPTModel` would compute other numbers.
        """
        ...

    def mappings(self, architecture: Architecture) -> list[Mapping]:
        """Return how each parameter is made of Hugging Face tensors, in the order of export."""
        ...


def register_converter(model_type: str, converter: Converter) -> None:
    """Let `converter` convert models of `model_type`, in place of any other that does."""
    _registered[model_type] = converter


def known_converters() -> list[str]:
    """Return the names of all entries, sorted."""
    installed = (entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))
    return sorted({*CONVERTERS, *_registered, *installed})


def converter_for(hf_config: Any, converter_type: str = "auto") -> Converter:
    """Return what converts a model.

    Args:
        hf_config: The model's config.
        converter_type: `policy.megatron_cfg.converter_type`: the name of an entry; "auto" is the
            config's `model_type`.

    Raises:
        ValueError: There is no such entry.
    """
    is_auto = converter_type == "auto"
    name = hf_config.model_type if is_auto else converter_type
    if (converter := _find(name)) is not None:
        return converter
    asked = (
        f"policy.model_name={hf_config.name_or_path!r} is a {name!r} model"
        if is_auto
        else f"policy.megatron_cfg.converter_type={name!r}"
    )
    raise ValueError(
        f"{asked}, for which there is no conversion to Megatron-core (there are: "
        f"{', '.join(known_converters())}); others register theirs as an entry point of "
        f"{ENTRY_POINT_GROUP!r}"
    )


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
