"""The model's full weights, all-gathered a layer at a time in the wire dtype.

Shards of one layer travel in one asynchronous all-gather; the next layer is gathered while the
current one is consumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import TYPE_CHECKING

import torch
from rl_interfaces.backend.transfer import (
    LayeredSource,
    check_blocks,
    check_names,
    overlap_gathers,
    quantized_metadata,
    quantized_pair,
)
from rl_refit import block_fp8
from rl_refit.adapters import DOWN, UP
from rl_refit.plan import block_of
from rl_refit.resharding import Shard, local_shards
from rl_refit.source import WeightMeta

from rl_dtensor_worker.model.convert import plan_reversals
from rl_dtensor_worker.model.lora import (
    AdaptedWeight,
    adapted_layers,
    adapted_weights,
    adapters_of,
    trained_parameters,
    without_adapters,
)
from rl_dtensor_worker.parallel.gather import BucketGather, QuantizedGather
from rl_dtensor_worker.parallel.structure import class_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import torch.distributed as dist
    from transformers import PreTrainedModel

    from rl_dtensor_worker.model.convert import Reversal

Tensors = dict[str, torch.Tensor]


def trained_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint: with adapters the trained ones, else the full state."""
    return trained_parameters(model) if adapted_layers(model) else persistent_state(model)


def persistent_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers; tied ones once, by the name that files have."""
    tied = dict(model.all_tied_weights_keys)
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    # A head that comes first among the modules gives its name to a weight that the embedding owns.
    tensors = {tied[n] if tied.get(n, n) not in named else n: p for n, p in named.items()}
    # The state dict has the persistent buffers, and each tied parameter under all its names.
    persistent = set(model.state_dict())
    tensors.update((n, b) for n, b in model.named_buffers() if n in persistent)
    return tensors


class ModelWeights(LayeredSource):
    """The full tensors of a sharded model, with the names and shapes of its checkpoint.

    Where transformers fuses or renames a checkpoint's tensors in memory, as it does with experts,
    each gathered tensor is converted back before the next one is; see `plan_reversals`.

    Tied tensors come once, under their first name. Each tensor is cast to the wire dtype before the
    all-gather, so that no more bytes than needed cross the network. Adapters are merged into the
    weights that are sent; the model's own tensors do not change.

    Args:
        model: The model; its parameters are read during iteration, not before.
        wire_dtype: The dtype of floating-point tensors on the wire; others keep theirs.
        group: The ranks that hold the shards of one copy. None: nothing is sharded.
        device: Where the full tensors are.
        merges: Whether adapters are merged; else the weights are those of the base.
        quantized: Names of the checkpoint whose tensors are in block-FP8. One that is the model's
            as it is has a byte per element in the all-gather too; one that is converted, or into
            which adapters are merged, is quantised after it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        wire_dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        merges: bool = True,
        quantized: Collection[str] = (),
    ) -> None:
        self._model = model
        self._wire_dtype = wire_dtype
        self._group = group
        self._device = device
        self._merges = merges
        self._quantized = frozenset(quantized)

    def quantized(self, names: Collection[str]) -> ModelWeights:
        """See `GatheredSource.quantized`."""
        check_blocks(names, self.metadata())
        return ModelWeights(
            self._model,
            wire_dtype=self._wire_dtype,
            device=self._device,
            group=self._group,
            merges=self._merges,
            quantized=names,
        )

    def metadata(self) -> list[WeightMeta]:
        """See `LayeredSource.metadata`."""
        return [meta for group in self._conversions for meta in self._sent(group)]

    def shards(self) -> dict[str, Shard]:
        """See `GatheredSource.shards`; only if the checkpoint has the model's tensors as they are.

        Raises:
            ValueError: transformers converts some, as it fuses experts; adapters are merged; or
                some are sent in 8 bits.
        """
        weights = without_adapters(persistent_state(self._model))
        if self._merges and adapted_weights(self._model):
            raise ValueError("adapters are merged into full tensors: send those, not slices")
        if self._quantized:
            raise ValueError("slices are not quantised: send full tensors")
        found: dict[str, torch.Tensor] = {}
        for group in self._conversions:
            reversal = group.reversal
            if not reversal.is_renaming:
                raise ValueError(
                    f"{group.converted[0].name} is converted from {reversal.names}, and a rank's "
                    "shards of these are no slices of it: send full tensors"
                )
            found[reversal.target] = weights[reversal.names[0]]
        return local_shards(found)

    def converted_together(self) -> list[list[str]]:
        """Return the names of the tensors that one gather and conversion makes, in order."""
        return [[meta.name for meta in self._sent(group)] for group in self._conversions]

    @torch.no_grad()
    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See `LayeredSource.gather`; within a layer in the order of `metadata`."""
        state = persistent_state(self._model)
        names = check_names(names, self._conversion_of)
        yield from overlap_gathers(self._layers(names, without_adapters(state), adapters_of(state)))

    @cached_property
    def _conversions(self) -> list[_Conversion]:
        ignored = set(getattr(self._model, "_keys_to_ignore_on_save", None) or ())
        # On the meta device: names, shapes and dtypes are those of a conversion of no values.
        empty = {
            name: torch.empty(tensor.shape, dtype=self._dtype_of(tensor), device="meta")
            for name, tensor in without_adapters(persistent_state(self._model)).items()
            if name not in ignored
        }
        found: list[_Conversion] = []
        for reversal in plan_reversals(self._model, empty):
            converted = reversal.convert(self._model, empty)
            metas = [
                WeightMeta(name, each.dtype, tuple(each.shape)) for name, each in converted.items()
            ]
            found.append(_Conversion(reversal=reversal, converted=metas))
        return found

    @cached_property
    def _conversion_of(self) -> dict[str, int]:
        """The place in `_conversions` of each name of the checkpoint."""
        groups = enumerate(self.converted_together())
        return {name: place for place, names in groups for name in names}

    def _sent(self, group: _Conversion) -> list[WeightMeta]:
        return [
            each
            for meta in group.converted
            for each in (quantized_metadata(meta) if meta.name in self._quantized else [meta])
        ]

    def _layers(self, names: list[str], weights: Tensors, adapters: Tensors) -> Iterator[_Layer]:
        """Start the gathers of each layer of `names`."""
        adapted = adapted_weights(self._model) if self._merges else {}
        for _, group in groupby(names, key=block_of):
            wanted = set(group)
            places = sorted({self._conversion_of[name] for name in wanted})
            reversals = [self._conversions[place].reversal for place in places]
            chosen = {name: weights[name] for each in reversals for name in each.names}
            merges = {name: adapted[name] for name in chosen if name in adapted}
            early = {
                each.names[0]: chosen.pop(each.names[0])
                for each in reversals
                if each.is_renaming
                and each.target in self._quantized
                and each.names[0] not in merges
                and chosen[each.names[0]].ndim == 2
            }
            factors = [name for merge in merges.values() for name in (merge.down, merge.up)]
            yield _Layer(
                model=self._model,
                reversals=reversals,
                wanted=wanted,
                weights=self._start(chosen),
                early=QuantizedGather.start(
                    list(early.items()), self._wire_dtype, group=self._group, device=self._device
                ),
                quantized=self._quantized,
                # Factors are multiplied before the cast: in the wire dtype they would be rounded.
                factors=self._start({name: adapters[name] for name in factors}, torch.float32),
                merges=merges,
            )

    def _start(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
    ) -> BucketGather:
        return BucketGather.start(
            list(tensors.items()),
            [dtype or self._dtype_of(tensor) for tensor in tensors.values()],
            group=self._group,
            device=self._device,
        )

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self._wire_dtype if tensor.is_floating_point() else tensor.dtype

    def names_in_checkpoint(self) -> dict[str, WeightMeta]:
        """Return what each tensor of the model is in the checkpoint, if it is one tensor there."""
        return {
            group.reversal.names[0]: group.converted[0]
            for group in self._conversions
            if len(group.reversal.names) == len(group.converted) == 1
        }


class AdapterWeights(LayeredSource):
    """The factors of a sharded model's adapters, as `rl_refit.adapters` names them.

    B is multiplied by its scale before the cast to the wire dtype.

    Args:
        base: The weights that the adapters belong to, see `ModelWeights`.
        model: The model, with adapters.
        wire_dtype: The dtype of the factors on the wire.
        group: The ranks that hold the shards of one copy. None: nothing is sharded.
        device: Where the full tensors are.

    Raises:
        ValueError: There are no adapters, or one of a weight that the checkpoint has not as it is.
    """

    def __init__(
        self,
        base: ModelWeights,
        model: PreTrainedModel,
        *,
        wire_dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._wire_dtype = wire_dtype
        self._group = group
        self._device = device
        self._adapters = _named_as_sent(base, model)

    def metadata(self) -> list[WeightMeta]:
        """See `LayeredSource.metadata`."""
        factors = adapters_of(dict(self._model.named_parameters()))
        return [
            WeightMeta(name, self._wire_dtype, tuple(factors[source].shape))
            for layer, adapter in self._adapters.items()
            for name, source in ((layer + DOWN, adapter.down), (layer + UP, adapter.up))
        ]

    @torch.no_grad()
    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See `LayeredSource.gather`."""
        known = {meta.name: None for meta in self.metadata()}
        yield from overlap_gathers(self._layers(check_names(names, known)))

    def _layers(self, names: list[str]) -> Iterator[_Factors]:
        """Start the gathers of each layer of `names`."""
        factors = adapters_of(dict(self._model.named_parameters()))
        for _, group in groupby(names, key=block_of):
            sources: Tensors = {}
            scales: dict[str, float] = {}
            for name in group:
                adapter = self._adapters[name.removesuffix(DOWN).removesuffix(UP)]
                is_up = name.endswith(UP)
                sources[name] = factors[adapter.up if is_up else adapter.down]
                scales[name] = adapter.scaling if is_up else 1.0
            gathers = BucketGather.start(
                list(sources.items()),
                # Scaled before the cast, so that a product is rounded once.
                [torch.float32] * len(sources),
                group=self._group,
                device=self._device,
            )
            yield _Factors(gathers=gathers, scales=scales, dtype=self._wire_dtype)


def _named_as_sent(base: ModelWeights, model: PreTrainedModel) -> dict[str, AdaptedWeight]:
    """Return the adapters by the layer's name in the checkpoint."""
    found: dict[str, AdaptedWeight] = {}
    known = base.names_in_checkpoint()
    factors = adapters_of(dict(model.named_parameters()))
    for name, adapter in adapted_weights(model).items():
        meta = known.get(name)
        shape = (factors[adapter.up].shape[0], factors[adapter.down].shape[1])
        if meta is None or meta.shape != shape or adapter.is_transposed:
            raise ValueError(
                f"the adapter of {name} cannot be sent alone: {class_name(model)} has no "
                f"{list(shape)} tensor of that layer in its checkpoints. Leave the layer out of "
                "policy.dtensor_cfg.lora.target_modules, or set refit.adapters to 'merged'"
            )
        found[meta.name.removesuffix(".weight")] = adapter
    if not found:
        raise ValueError("adapters are sent alone only with policy.dtensor_cfg.lora.enabled=True")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Factors:
    """The gathers of one layer's adapters."""

    gathers: BucketGather
    scales: Mapping[str, float]
    dtype: torch.dtype

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for them; yield name and full tensor."""
        for name, factor in self.gathers.finish():
            scale = self.scales[name]
            yield name, (factor if scale == 1 else factor * scale).to(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Conversion:
    """Tensors of the model that become tensors of the checkpoint together."""

    reversal: Reversal
    converted: list[WeightMeta]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """The gathers of one layer's weights, and of the adapters that are merged into them."""

    model: PreTrainedModel
    reversals: list[Reversal]
    """How the weights are converted, in the order in which they are gathered."""
    wanted: set[str]
    """Names of the checkpoint."""
    weights: BucketGather
    early: QuantizedGather
    """Of the weights that are quantised before."""
    quantized: Collection[str]
    """Names of the checkpoint that are quantised, before or after."""
    factors: BucketGather
    merges: Mapping[str, AdaptedWeight]

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for them; yield name and full tensor."""
        for name, tensor in self._all():
            if name in self.wanted:
                yield name, tensor

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        factors = dict(self.factors.finish())
        weights, early = self.weights.finish(), self.early.finish()
        for reversal in self.reversals:
            if reversal.names[0] in self.early.scales:
                _, values, scales = next(early)
                yield from quantized_pair(reversal.target, values, scales)
                continue
            merged: Tensors = {}
            for name, weight in islice(weights, len(reversal.names)):
                merge = self.merges.get(name)
                merged[name] = weight if merge is None else merge.merge(weight, factors)
            for name, tensor in reversal.convert(self.model, merged).items():
                if name in self.quantized:
                    yield from quantized_pair(name, *block_fp8.quantize(tensor))
                else:
                    yield name, tensor
