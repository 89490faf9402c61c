"""Which tensors of a checkpoint's files make which tensor of a model, and how.

The plan is made of names and shapes alone, while the model is whole and on the meta device. Names
and fusions are those of transformers' own conversions, as `from_pretrained` applies them.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from rl_interfaces.backend.checkpoint.safetensors_files import take
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from rl_dtensor_worker.model.sharded_indices import owned_indices
from rl_dtensor_worker.parallel.fsdp import local_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_interfaces.backend.checkpoint.safetensors_files import SafetensorsFiles
    from torch import nn

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Conversion:
    """The tensors of the files that become one tensor of the model, or a few at once."""

    converter: WeightConverter | None
    """None: the tensor is taken as it is."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """The names in the files by the converter's pattern, in the order the converter wants."""
    name: str
    """Of the model's tensor, the first where there are several."""

    @property
    def stacks_rows(self) -> bool:
        """Whether the tensors of a pattern are the rows of the result, so that some suffice."""
        if self.converter is None or len(self.converter.target_patterns) != 1:
            return False
        first, *others = self.converter.operations
        kept = [
            (isinstance(each, Concatenate) and each.dim > 0)
            or (isinstance(each, Transpose) and min(each.dim0, each.dim1) > 0)
            for each in others
        ]
        return isinstance(first, MergeModulelist) and first.dim == 0 and all(kept)

    def target_shapes(self, model: nn.Module, files: SafetensorsFiles) -> dict[str, torch.Size]:
        """Return the shape of each tensor of the model that this makes, by converting nothing."""
        if self.converter is None:
            return {self.name: files.shape(self.only_source())}
        with torch.device("meta"):
            empty = {
                pattern: [torch.empty(files.shape(name)) for name in names]
                for pattern, names in self.sources.items()
            }
        return {name: tensor.shape for name, tensor in self._convert(model, empty).items()}

    @torch.no_grad()
    def fill(
        self, model: nn.Module, state: Mapping[str, torch.Tensor], files: SafetensorsFiles
    ) -> None:
        """Read what this rank holds into its shards in `state`."""
        target = state[self.name]
        if self.converter is None:
            part = files.read(self.only_source(), owned_indices(target))
            local_tensor(target).copy_(part)
            return
        rows = owned_indices(target)[0] if self.stacks_rows else None
        read = {
            pattern: [
                files.read(name).to(target.dtype)
                for name in (names if rows is None else [names[row] for row in rows.tolist()])
            ]
            for pattern, names in self.sources.items()
        }
        if not all(read.values()):
            return  # This rank holds no row.
        for name, converted in self._convert(model, read).items():
            indices = owned_indices(state[name])
            if rows is not None:
                indices[0] = torch.arange(len(rows))
            local_tensor(state[name]).copy_(take(converted, indices))

    def only_source(self) -> str:
        """Return the name in the files of what is taken as it is."""
        ((name,),) = self.sources.values()
        return name

    def _convert(
        self, model: nn.Module, tensors: dict[str, list[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        assert self.converter is not None
        converter = copy.deepcopy(self.converter)
        converter.collected_tensors.update(tensors)  # type: ignore[arg-type]
        converted = converter.convert(self.name, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }


def plan_conversions(
    model: nn.Module, files: SafetensorsFiles, model_name: str
) -> list[Conversion]:
    """Return what makes each tensor of `model`, of the names and shapes in `files` alone.

    The model remembers the conversions that were used, as after `from_pretrained`: its export has
    the names that the files have.

    Raises:
        ValueError: Tensors of the model are missing, or have another shape.
    """
    state = model.state_dict(keep_vars=True)
    renaming = _Renaming(model, state)
    conversions: dict[str, Conversion] = {}
    unexpected: set[str] = set()
    for name in sorted(files.names, key=dot_natural_key):
        target, pattern = renaming.target_of(name)
        if target not in state:
            unexpected.add(target)
            continue
        converter = renaming.converters.get(pattern) if pattern is not None else None
        conversion = conversions.setdefault(target, Conversion(converter=converter, name=target))
        conversion.sources.setdefault(pattern or "", []).append(name)
    model._weight_conversions = [each for each in renaming.mapping if each.was_used()]  # type: ignore[assignment]
    shapes: dict[str, torch.Size] = {}
    for conversion in conversions.values():
        try:
            shapes |= conversion.target_shapes(model, files)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"policy.model_name={model_name!r}: {conversion.name} cannot be made of the "
                f"tensors {conversion.sources} of the checkpoint: {error}"
            ) from error
    _check_shapes(shapes, state, model_name)
    _check_names(model, set(shapes), unexpected, model_name)
    return list(conversions.values())


class _Renaming:
    """Transformers' way from a name in the files to one of the model."""

    def __init__(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        self.mapping: list[Any] = get_model_conversion_mapping(model)  # type: ignore[arg-type]
        self._renamings = [each for each in self.mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in self.mapping if isinstance(each, WeightConverter)]
        self.converters = {
            pattern: each for each in self._converters for pattern in each.source_patterns
        }
        self._prefix: str = model.base_model_prefix  # type: ignore[assignment]
        self._state = dict(state)

    def target_of(self, name: str) -> tuple[str, str | None]:
        """Return the name in the model, and the pattern of the converter that leads there."""
        ways = ((self._renamings, self._converters), ([], []))
        for renamings, converters in ways:
            target, pattern = rename_source_key(
                name, renamings, converters, self._prefix, self._state
            )
            if target in self._state or name not in self._state:
                break
        return target, pattern


def _check_shapes(
    shapes: Mapping[str, torch.Size], state: Mapping[str, torch.Tensor], model_name: str
) -> None:
    for name, shape in shapes.items():
        if shape != state[name].shape:
            raise ValueError(
                f"policy.model_name={model_name!r}: {name} has shape {tuple(shape)} in the "
                f"checkpoint, and {tuple(state[name].shape)} in the model that its config describes"
            )


def _check_names(model: nn.Module, found: set[str], unexpected: set[str], model_name: str) -> None:
    state = model.state_dict(keep_vars=True)
    filled = {id(state[name]) for name in found}
    names = SimpleNamespace(
        missing_keys={name for name, tensor in state.items() if id(tensor) not in filled},
        unexpected_keys=unexpected,
    )
    model._adjust_missing_and_unexpected_keys(names)  # type: ignore[operator]
    if names.unexpected_keys:
        logger.warning(
            "%s has %d tensors that %s does not have, and that are not read: %s",
            model_name,
            len(names.unexpected_keys),
            type(model).__name__,
            sorted(names.unexpected_keys)[:5],
        )
    # A buffer has the value that the model itself gives it.
    missing = sorted(names.missing_keys - {name for name, _ in model.named_buffers()})
    if missing:
        raise ValueError(
            f"policy.model_name={model_name!r} lacks {len(missing)} tensors of "
            f"{type(model).__name__}, first {missing[:5]}"
        )
