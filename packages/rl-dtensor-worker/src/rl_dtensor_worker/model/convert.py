"""How tensors in checkpoint files are converted to tensors of a model, and back.

The plans are made from names and shapes alone, the first while the model is unsharded and on the
meta device. Renamings and fusions are transformers' own conversions, as `from_pretrained` and
`save_pretrained` apply them.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from rl_interfaces.backend.checkpoint.hf_files import take
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from rl_dtensor_worker.parallel.fsdp import local_tensor, owned_indices

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from rl_interfaces.backend.checkpoint.hf_files import SafetensorsFiles
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Conversion:
    """Tensors in the files that are converted together to one tensor of the model, or several."""

    converter: WeightConverter | None
    """None: the tensor is copied as it is."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names in the files by the converter's source pattern, in the order that it expects."""
    name: str
    """Name of the model's tensor; the first if there are several."""

    @property
    def stacks_rows(self) -> bool:
        """Whether each source is one row of the result, so that a rank can read its rows alone."""
        if self.converter is None or len(self.converter.target_patterns) != 1:
            return False
        first, *others = self.converter.operations
        kept = [
            (isinstance(each, Concatenate) and each.dim > 0)
            or (isinstance(each, Transpose) and min(each.dim0, each.dim1) > 0)
            for each in others
        ]
        return isinstance(first, MergeModulelist) and first.dim == 0 and all(kept)

    def target_shapes(
        self, model: PreTrainedModel, files: SafetensorsFiles
    ) -> dict[str, torch.Size]:
        """Return the shape of each resulting tensor, from a conversion on the meta device."""
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
        self, model: PreTrainedModel, state: Mapping[str, torch.Tensor], files: SafetensorsFiles
    ) -> None:
        """Read this rank's shards into `state`."""
        target = state[self.name]
        if self.converter is None:
            shard = files.read(self.only_source(), owned_indices(target))
            local_tensor(target).copy_(shard)
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
            return  # This rank has no row.
        for name, converted in self._convert(model, read).items():
            indices = owned_indices(state[name])
            if rows is not None:
                indices[0] = torch.arange(len(rows))
            local_tensor(state[name]).copy_(take(converted, indices))

    def only_source(self) -> str:
        """Return the name in the files of a tensor that is copied as it is."""
        ((name,),) = self.sources.values()
        return name

    def _convert(
        self, model: PreTrainedModel, tensors: dict[str, list[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        assert self.converter is not None
        return _run(self.converter, self.name, tensors, model)


@dataclass(kw_only=True, slots=True)
class Reversal:
    """Tensors of the model that are converted together to one tensor of a checkpoint, or several.

    The inverse of a `Conversion`.
    """

    converter: WeightConverter | None
    """None: the tensor is renamed at most."""
    target: str
    """Name in the checkpoint, with `*` for the numbers of a module list."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names in the model by the converter's source pattern."""

    @property
    def names(self) -> list[str]:
        """The names in the model."""
        return [name for names in self.sources.values() for name in names]

    @property
    def is_renaming(self) -> bool:
        """Whether the one tensor is that of the checkpoint, but for its name."""
        return self.converter is None

    @torch.no_grad()
    def convert(
        self, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return full tensors under the names, and in the shapes, of the checkpoint.

        Args:
            model: The model, whose config has sizes that conversions need.
            tensors: The full tensors of `names`.
        """
        if self.converter is None:
            (name,) = self.names
            return {self.target: tensors[name]}
        collected = {
            pattern: [tensors[name] for name in names] for pattern, names in self.sources.items()
        }
        converted = _run(self.converter, self.target, collected, model)
        return {name: tensor.contiguous() for name, tensor in converted.items()}


def plan_reversals(model: PreTrainedModel, names: Iterable[str]) -> list[Reversal]:
    """Return how the tensors `names` of `model` become those of its checkpoint, in their order.

    As `save_pretrained` does: it reverses the conversions that loading has used or, for a model
    that was not loaded, all that there are for its class.
    """
    names = list(names)
    used = getattr(model, "_weight_conversions", None)
    if used is None:
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        # Whether a checkpoint had the prefix is unknown.
        used = [each for each in mapping if not isinstance(each, PrefixChange)]
    inverse = [each.reverse_transform() for each in reversed(used)]
    renamings = [each for each in inverse if isinstance(each, WeightRenaming)]
    converters = [each for each in inverse if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, Reversal] = {}
    # Sorted: some renamings depend on a name that comes before.
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, reverse=True)
        converter = None if pattern is None else by_pattern[pattern]
        reversal = found.setdefault(target, Reversal(converter=converter, target=target))
        reversal.sources.setdefault(pattern or "", []).append(name)
    places = {name: place for place, name in enumerate(names)}
    return sorted(found.values(), key=lambda each: min(places[name] for name in each.names))


def _run(
    converter: WeightConverter,
    name: str,
    tensors: Mapping[str, list[torch.Tensor]],
    model: PreTrainedModel,
) -> dict[str, torch.Tensor]:
    # Converters collect tensors in themselves, and are used more than once.
    converter = copy.deepcopy(converter)
    converter.collected_tensors.update(tensors)  # type: ignore[arg-type]
    converted = converter.convert(name, model=model, config=model.config)
    return {
        name: value[0] if isinstance(value, list) else value for name, value in converted.items()
    }


def plan_conversions(
    model: PreTrainedModel,
    files: SafetensorsFiles,
    model_name: str,
    *,
    may_lack: Collection[str] = (),
) -> list[Conversion]:
    """Return the conversions that make the tensors of `model`, from names and shapes alone.

    The model keeps the conversions that were used, as after `from_pretrained`, so that its export
    has the names of the files.

    Args:
        model: On the meta device.
        files: Of the checkpoint.
        model_name: For the errors.
        may_lack: Tensors of the model that the files need not have.

    Raises:
        ValueError: Tensors of the model are missing from the files, or have another shape there.
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
                f"policy.model_name={model_name!r}: {conversion.name} cannot be converted "
                f"from the tensors {conversion.sources} of the checkpoint: {error}"
            ) from error
    _check_shapes(shapes, state, model_name)
    _check_names(model, {*shapes, *may_lack}, unexpected, model_name)
    return list(conversions.values())


class _Renaming:
    """Maps names in the files to names in the model, as transformers does."""

    def __init__(self, model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> None:
        self.mapping = get_model_conversion_mapping(model)
        self._renamings = [each for each in self.mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in self.mapping if isinstance(each, WeightConverter)]
        self.converters = {
            pattern: each for each in self._converters for pattern in each.source_patterns
        }
        self._prefix = model.base_model_prefix
        self._state = dict(state)

    def target_of(self, name: str) -> tuple[str, str | None]:
        """Return the name in the model, and the source pattern of its converter, if any."""
        # A checkpoint that a newer transformers saved has the model's names already: the second try
        # takes a name as it is, if renaming leads nowhere.
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


def _check_names(
    model: PreTrainedModel, found: set[str], unexpected: set[str], model_name: str
) -> None:
    state = model.state_dict(keep_vars=True)
    filled = {id(state[name]) for name in found}
    names = SimpleNamespace(
        missing_keys={name for name, tensor in state.items() if id(tensor) not in filled},
        unexpected_keys=unexpected,
    )
    model._adjust_missing_and_unexpected_keys(names)  # type: ignore[arg-type]
    if names.unexpected_keys:
        logger.warning(
            "%s has %d tensors that %s does not have; they are ignored: %s",
            model_name,
            len(names.unexpected_keys),
            type(model).__name__,
            sorted(names.unexpected_keys)[:5],
        )
    # Missing buffers keep the values of the model's own initialisation.
    missing = sorted(names.missing_keys - {name for name, _ in model.named_buffers()})
    if missing:
        raise ValueError(
            f"policy.model_name={model_name!r} lacks {len(missing)} tensors of "
            f"{type(model).__name__}, first {missing[:5]}"
        )
