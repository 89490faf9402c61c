"""What an engine's rank consumes, found by running its own loader on tensors without values.

The loader gets tensors on the meta device. Whatever it takes of them by views (narrow, chunk,
transpose, index, reshape) shares their storage, with an offset and strides that say which
elements it is. A dispatch mode watches for the copy into a parameter, whose view says where they
go, and runs no copy: the engine's weights stay as they are. Fusions (qkv, gate and up, stacks of
experts) and the shards of tensor parallelism come out by themselves.
"""

# torch annotates its dispatch modes only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingParameterType=false
# pyright: reportPrivateUsage=false, reportUnknownParameterType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_refit.plan import Metadata, read_specs
from rl_refit.resharding.exchange import Want
from rl_refit.resharding.slices import Box

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

MOST_SLICES = 4096
"""Of one copy, whose elements are no box of the source: more are not listed."""

_COPIES = (torch.ops.aten.copy_.default,)
_SAME_ELEMENTS = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.contiguous.default,
)


class Consumed(NamedTuple):
    """A box of a trainer's tensor, and its place in a parameter of the engine."""

    name: str
    shape: tuple[int, ...]
    """Of the trainer's full tensor."""
    box: Box
    target: str
    """The engine's parameter."""
    offset: int
    """Of the first element in the parameter's storage, from the parameter's own first one."""
    strides: tuple[int, ...]
    """In the parameter's storage, for each dim of the box."""

    def want(self, targets: Mapping[str, torch.Tensor]) -> Want:
        """Return the place of the slice, in the parameters that were recorded."""
        tensor = targets[self.target].detach()
        start = int(tensor.storage_offset()) + self.offset
        return Want(
            self.name, self.shape, self.box, tensor.as_strided(self.box.shape, self.strides, start)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Consumers:
    """What one engine rank consumes.

    Attributes:
        slices: What goes into parameters as it is.
        full: Tensors that cannot be sliced, with the reason: the loader computes with their values,
            so that they have to be sent in full and given to it.
        unused: Tensors that the loader has not read.
    """

    slices: tuple[Consumed, ...]
    full: Mapping[str, str]
    unused: tuple[str, ...]


def record(load: Loader, metadata: Metadata, targets: Mapping[str, torch.Tensor]) -> Consumers:
    """Run a loader on tensors without values; return what it takes of each, and where it goes.

    Args:
        load: The engine's, such as vLLM's `model.load_weights`.
        metadata: Name, dtype and full shape of the trainer's tensors.
        targets: The engine's parameters by name, on any device; their values do not change.
    """
    specs = read_specs(metadata)
    recorder = _Recorder(targets)
    sources = [
        (
            spec.name,
            recorder.source(spec.name, torch.empty(spec.shape, device="meta", dtype=spec.dtype)),
        )
        for spec in specs
    ]
    with torch.no_grad(), recorder:
        load(iter(sources))
    slices = tuple(each for each in recorder.slices if each.name not in recorder.full)
    touched = {each.name for each in slices} | recorder.full.keys()
    unused = tuple(spec.name for spec in specs if spec.name not in touched)
    return Consumers(slices=slices, full=recorder.full, unused=unused)


class _Recorder(TorchDispatchMode):
    def __init__(self, targets: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.slices: list[Consumed] = []
        self.full: dict[str, str] = {}
        self._targets = {_storage(tensor): (name, tensor) for name, tensor in targets.items()}
        # With the tensor of each storage, as an address may be reused once it is freed.
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def source(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._sources[_storage(tensor)] = name, tensor
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in _flat(args) if isinstance(each, torch.Tensor)]
        read = {name for each in tensors if (name := self._name_of(each))}
        into_target = bool(tensors) and _storage(tensors[0]) in self._targets
        if func in _COPIES and into_target:
            return self._copy(args[0], args[1])
        if into_target and func._schema.is_mutable:
            self._refuse(read, f"the loader writes it by {func}")
            return args[0]
        if not read:
            return func(*args, **kwargs)
        if func in _SAME_ELEMENTS:
            return self._same_elements(args[0], kwargs)
        if not func.is_view and not _is_metadata(func):
            self._refuse(read, f"the loader computes with it: {func}")
            # Of the same kind on the meta device, whose values nobody reads.
            kwargs = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
            args = _to_meta(args)
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor):
                self._sources[_storage(out)] = min(read), out
            return out
        return func(*args, **kwargs)

    def _same_elements(self, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
        dtype = kwargs.get("dtype") or tensor.dtype
        copy = torch.empty(tensor.shape, dtype=dtype, device="meta")
        self._copies[_storage(copy)] = tensor, copy
        return copy

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        name = self._name_of(source)
        if name is None:
            return target  # a constant, such as the zeros of padding: it is there already
        try:
            self._record(name, target, source)
        except _NoSlicesError as error:
            self._refuse({name}, str(error))
        return target

    def _record(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name in self.full:
            return
        while _storage(source) in self._copies:
            source, target = self._through_copy(source, target)
        full = self._sources[_storage(source)][1]
        if source.shape != target.shape:
            source = source.expand(target.shape)
        param_name, parameter = self._targets[_storage(target)]
        start = int(target.storage_offset()) - int(parameter.storage_offset())
        for box, offset, strides in slices_of(
            source.shape,
            (int(source.storage_offset()), source.stride()),
            (start, target.stride()),
            tuple(full.shape),
        ):
            self.slices.append(Consumed(name, tuple(full.shape), box, param_name, offset, strides))

    def _through_copy(
        self, view: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a view of what was copied in place of a view of the copy, and its target."""
        original, copy = self._copies[_storage(view)]
        found = slices_of(
            view.shape,
            (int(view.storage_offset()), view.stride()),
            (int(target.storage_offset()), target.stride()),
            tuple(copy.shape),
        )
        if len(found) != 1:
            raise _NoSlicesError("the loader takes several slices of a copy at once")
        box, offset, strides = found[0]
        return box.view_of(original), target.as_strided(box.shape, strides, offset)

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        storage = _storage(tensor)
        while storage in self._copies:
            storage = _storage(self._copies[storage][0])
        return self._sources[storage][0] if storage in self._sources else None

    def _refuse(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.full.setdefault(name, reason)


class _NoSlicesError(Exception):
    """The elements of a view are not a moderate number of boxes."""


def slices_of(
    shape: Sequence[int],
    source: tuple[int, Sequence[int]],
    target: tuple[int, Sequence[int]],
    full_shape: tuple[int, ...],
) -> list[tuple[Box, int, tuple[int, ...]]]:
    """Return the boxes of a contiguous tensor that a view of it consists of.

    Args:
        shape: Of the view, and of the view that it is copied into.
        source: Offset and strides of the view in the contiguous tensor.
        target: Offset and strides of the view that it is copied into.
        full_shape: Of the contiguous tensor.

    Returns:
        For each box, in the tensor's dims, the offset and the strides of its elements' places.

    Example: the transpose of a `[2, 3]` matrix, copied into a contiguous `[3, 2]`
        slices_of((3, 2), (0, (1, 3)), (0, (2, 1)), (2, 3)) -> [(Box((0, 0), (2, 3)), 0, (1, 2))]
    """
    if 0 in shape:
        return []
    axes = [
        (size, step, to)
        for size, step, to in zip(shape, source[1], target[1], strict=True)
        if size > 1
    ]
    full_strides = [1] * len(full_shape)
    for dim in range(len(full_shape) - 2, -1, -1):
        full_strides[dim] = full_strides[dim + 1] * full_shape[dim + 1]
    return _boxes(axes, source[0], target[0], full_shape, full_strides)


def _boxes(
    axes: list[tuple[int, int, int]],
    start: int,
    place: int,
    full_shape: Sequence[int],
    full_strides: Sequence[int],
) -> list[tuple[Box, int, tuple[int, ...]]]:
    offset: list[int] = []
    rest = start
    for step in full_strides:
        offset.append(rest // step)
        rest %= step
    sizes, strides = [1] * len(full_shape), [0] * len(full_shape)
    # From the smallest step up, so that the outer half of a dim that was split is met last.
    pending = sorted(axes, key=lambda axis: axis[1])
    while pending:
        size, step, to = pending.pop(0)
        if step == 0:
            raise _NoSlicesError("the loader repeats its elements")
        dim = max(
            (d for d, each in enumerate(full_strides) if each <= step and full_shape[d] > 1),
            key=lambda d: full_strides[d],
        )
        unit = full_strides[dim]
        room = full_shape[dim] - offset[dim]
        if step == unit and sizes[dim] == 1 and size > room:
            # It runs over several dims, as of a flattened view: split it.
            inner = full_shape[dim]
            if offset[dim] or size % inner:
                raise _NoSlicesError("the loader takes a range that begins or ends within a row")
            pending.insert(0, (inner, step, to))
            pending.insert(1, (size // inner, step * inner, to * inner))
            continue
        is_next = step == unit * sizes[dim] and (sizes[dim] == 1 or to == strides[dim] * sizes[dim])
        if is_next and offset[dim] + sizes[dim] * size <= full_shape[dim]:
            strides[dim] = to if sizes[dim] == 1 else strides[dim]
            sizes[dim] *= size
            continue
        if size > MOST_SLICES:
            raise _NoSlicesError(f"the loader takes {size} slices at once")
        others = [axis for axis in axes if axis != (size, step, to)]
        found = [
            each
            for index in range(size)
            for each in _boxes(
                others, start + index * step, place + index * to, full_shape, full_strides
            )
        ]
        if len(found) > MOST_SLICES:
            raise _NoSlicesError(f"the loader takes {len(found)} slices at once")
        return found
    return [(Box(tuple(offset), tuple(sizes)), place, tuple(strides))]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_metadata(func: Any) -> bool:
    return func in (torch.ops.aten.detach.default, torch.ops.aten._unsafe_view.default)


def _flat(values: Iterable[Any]) -> list[Any]:
    return [
        inner
        for each in values
        for inner in (_flat(each) if isinstance(each, list | tuple) else [each])
    ]


def _to_meta(values: Sequence[Any]) -> list[Any]:
    return [
        each.to("meta")
        if isinstance(each, torch.Tensor)
        else _to_meta(each)
        if isinstance(each, list | tuple)
        else each
        for each in values
    ]
