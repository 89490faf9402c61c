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

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_refit.plan import Metadata, read_specs
from rl_refit.resharding.accesses import Access, conflicts
from rl_refit.resharding.messages import Want
from rl_refit.resharding.slices import Box
from rl_refit.resharding.views import NoSlicesError, slices_of

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_COPIES = (torch.ops.aten.copy_.default,)
_SAME_ELEMENTS = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
)
_METADATA = (torch.ops.aten._unsafe_view.default,)
_OF_SHAPES = (
    *_METADATA,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.full_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.new_ones.default,
    torch.ops.aten.new_full.default,
)
"""Of the engine's parameters, they read no values."""


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
            or overwrites them. They have to be sent in full and given to it in one load.
        unused: Tensors that the loader has not read.
        partial: Parameters with elements that neither slices nor zeros of the loader fill.
    """

    slices: tuple[Consumed, ...]
    full: Mapping[str, str]
    unused: tuple[str, ...]
    partial: tuple[str, ...] = ()

    def of_complete_parameters(self) -> Consumers:
        """Return these slices where they fill their parameters; all other tensors go in full.

        For an engine that takes a parameter as a whole: what comes in slices has to be all of it.
        """
        open_targets, names = set(self.partial), set[str]()
        # A tensor in full fills all of its places, so that others there come in full as well.
        while more := {each.name for each in self.slices if each.target in open_targets} - names:
            names |= more
            open_targets |= {each.target for each in self.slices if each.name in names}
        shared = dict.fromkeys(sorted(names), "it shares a parameter with what is no slice")
        return Consumers(
            slices=tuple(each for each in self.slices if each.name not in names),
            full={**self.full, **shared},
            unused=self.unused,
        )


def record(load: Loader, metadata: Metadata, targets: Mapping[str, torch.Tensor]) -> Consumers:
    """Run a loader on tensors without values; return what it takes of each, and where it goes.

    Args:
        load: The engine's, such as vLLM's `model.load_weights`.
        metadata: Name, dtype and full shape of the trainer's tensors.
        targets: The engine's parameters by name, on any device; their values do not change.

    Raises:
        ValueError: The loader branches on values of a tensor, or sets the `data` of a parameter.
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
    try:
        with torch.no_grad(), recorder:
            load(iter(sources))
    finally:
        replaced = recorder.restore()
    if replaced:
        raise ValueError(f"the loader gives {', '.join(replaced)} another storage")
    recorder.refuse_conflicts()
    slices = tuple(each for each in recorder.slices if each.name not in recorder.full)
    touched = {each.name for each in slices} | recorder.full.keys()
    unused = tuple(spec.name for spec in specs if spec.name not in touched)
    return Consumers(
        slices=slices, full=recorder.full, unused=unused, partial=recorder.partial(slices)
    )


class _Recorder(TorchDispatchMode):
    def __init__(self, targets: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.slices: list[Consumed] = []
        self.full: dict[str, str] = {}
        # Parameters may be views of one storage. The last member is what to restore.
        self._targets: dict[int, list[tuple[str, torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for name, tensor in targets.items():
            self._targets[_storage(tensor)].append((name, tensor, tensor.detach()))
        self._accesses: dict[int, list[Access]] = defaultdict(list)
        self._zeros: dict[int, list[Access]] = defaultdict(list)
        # With the tensor of each storage, as an address may be reused once it is freed.
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def source(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self._sources[_storage(tensor)] = name, tensor
        return tensor

    def restore(self) -> list[str]:
        """Give parameters whose `data` was set their own storage back; return their names."""
        replaced: list[str] = []
        for storage, parameters in self._targets.items():
            for name, tensor, original in parameters:
                if _storage(tensor) != storage:
                    tensor.data = original
                    replaced.append(name)
        return replaced

    def refuse_conflicts(self) -> None:
        """Refuse slices that the loader overwrites or reads back."""
        for accesses in self._accesses.values():
            reason = "the loader overwrites what it has written, or computes with it"
            self._refuse(conflicts(accesses), reason)

    def partial(self, slices: Iterable[Consumed]) -> tuple[str, ...]:
        """Return the parameters of these slices that have elements which nothing fills."""
        by_target: dict[str, list[Consumed]] = defaultdict(list)
        for each in slices:
            by_target[each.target].append(each)
        return tuple(
            name
            for storage, parameters in self._targets.items()
            for name, _, tensor in parameters
            if name in by_target and not self._is_filled(tensor, by_target[name], storage)
        )

    def _is_filled(self, tensor: torch.Tensor, slices: list[Consumed], storage: int) -> bool:
        # Slices that share elements are refused, so that their sizes often tell.
        if sum(each.box.numel for each in slices) == tensor.numel():
            return True
        numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        filled = torch.zeros(numel, dtype=torch.bool)
        start = int(tensor.storage_offset())
        for each in slices:
            filled.as_strided(each.box.shape, each.strides, start + each.offset).fill_(True)
        for zeros in self._zeros[storage]:
            zeros.view_of(filled, 0).fill_(True)
        return bool(filled.as_strided(tensor.shape, tensor.stride(), start).all())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Under inference mode `to` and `reshape` arrive as they are: they are views or copies.
        with self:
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        tensors = _tensors([*args, *kwargs.values()])
        read = {name for each in tensors if (name := self._name_of(each))}
        used = [each for each in tensors if _storage(each) in self._targets]
        if used and func in _COPIES and used[0] is args[0]:
            return self._copy(args[0], args[1])
        if used and not func.is_view and func not in _OF_SHAPES:
            written = _written(func, args, kwargs)
            for each in used:
                self._access(min(read, default=None), each, is_zero=_is_zero(func, args))
            if any(_storage(each) in self._targets for each in written):
                self._refuse(read, f"the loader writes it by {func}")
                return _returned(func, written)
        if not read or func.is_view or func in _METADATA:
            return func(*args, **kwargs)
        if func in _SAME_ELEMENTS:
            return self._same_elements(args[0], kwargs)
        return self._compute(func, args, kwargs, read)

    def _compute(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], read: set[str]
    ) -> Any:
        self._refuse(read, f"the loader computes with it: {func}")
        # Of the same kind on the meta device, whose values nobody reads.
        kwargs = dict(zip(kwargs, _to_meta(list(kwargs.values())), strict=True))
        kwargs = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
        try:
            out = func(*_to_meta(args), **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"the loader cannot go on without the values of {', '.join(sorted(read))} "
                f"({func}): leave them out of the metadata and send them in full"
            ) from error
        for each in _tensors([out]):
            self._sources[_storage(each)] = min(read), each
        return out

    def _same_elements(self, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
        dtype = kwargs.get("dtype") or tensor.dtype
        copy = torch.empty(tensor.shape, dtype=dtype, device="meta")
        self._copies[_storage(copy)] = tensor, copy
        return copy

    def _access(self, name: str | None, view: torch.Tensor, *, is_zero: bool = False) -> None:
        if not view.numel():
            return
        start, shape, strides = int(view.storage_offset()), tuple(view.shape), view.stride()
        itemsize = self._targets[_storage(view)][0][1].dtype.itemsize
        access = Access(name, start, shape, strides)
        if view.dtype.itemsize != itemsize:
            # All elements of the parameter that it may reach.
            first = start * view.dtype.itemsize // itemsize
            end = -(-access.end * view.dtype.itemsize // itemsize)
            access = Access(name, first, (end - first,), (1,))
        self._accesses[_storage(view)].append(access)
        if is_zero and view.dtype.itemsize == itemsize:
            self._zeros[_storage(view)].append(access)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        name = self._name_of(source)
        is_own = _storage(source) in self._targets
        is_zero = not (name or is_own or source.is_meta or bool(source.any()))
        self._access(name, target, is_zero=is_zero)
        if is_own:
            self._access(None, source)
        if name is None or name in self.full or not target.numel():
            return target  # a constant, such as the zeros of padding, is there already
        try:
            self._record(name, target, source.expand(target.shape))
        except NoSlicesError as error:
            self._refuse({name}, str(error))
        return target

    def _record(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        param_name, parameter = self._parameter_of(target)
        dtypes = [source.dtype, target.dtype]
        while _storage(source) in self._copies:
            source, target = self._through_copy(source, target)
            dtypes.insert(0, source.dtype)
        full = self._sources[_storage(source)][1]
        _require_one_cast(dtypes, full.dtype, parameter.dtype)
        if source.is_neg() or source.is_conj() or target.is_neg() or target.is_conj():
            raise NoSlicesError("the loader computes with it: a view negates its elements")
        start = int(target.storage_offset()) - int(parameter.storage_offset())
        for box, offset, strides in slices_of(
            source.shape,
            (int(source.storage_offset()), source.stride()),
            (start, target.stride()),
            tuple(full.shape),
        ):
            self.slices.append(Consumed(name, tuple(full.shape), box, param_name, offset, strides))

    def _parameter_of(self, target: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Return the parameter that has all elements of a view."""
        first, end = _extent(target)
        for name, tensor, _ in self._targets[_storage(target)]:
            start, stop = _extent(tensor)
            if start <= first and end <= stop:
                return name, tensor
        raise NoSlicesError("the loader writes it into several parameters at once")

    def _through_copy(
        self, view: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a view of what was copied in place of a view of the copy, and its target."""
        original, copy = self._copies[_storage(view)]
        if view.dtype != copy.dtype:
            raise NoSlicesError("the loader reads the bits of a copy as another dtype")
        found = slices_of(
            view.shape,
            (int(view.storage_offset()), view.stride()),
            (int(target.storage_offset()), target.stride()),
            tuple(copy.shape),
        )
        if len(found) != 1:
            raise NoSlicesError("the loader takes several slices of a copy at once")
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


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a view in its storage, and one past its last."""
    start, size = int(tensor.storage_offset()), tensor.dtype.itemsize
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + last + 1) * size


def _require_one_cast(
    dtypes: Sequence[torch.dtype], full: torch.dtype, parameter: torch.dtype
) -> None:
    """Raise unless these casts give what one from the full tensor to the parameter gives."""
    first, last = dtypes[0], dtypes[-1]
    if (first, last) != (full, parameter):
        # Such as both of 8 bits, taken for uint8 to be copied.
        is_same = len({*dtypes}) == 1 and full == parameter
        if not is_same or first.itemsize != full.itemsize:
            raise NoSlicesError(f"the loader takes the bits of {full} for {first}, or writes such")
        return
    inner = list(dtypes[:-1])
    while inner and inner[-1] == last:
        inner.pop()
    for one, other in pairwise(inner):
        if one != other and not _holds(other, one):
            raise NoSlicesError(f"the loader casts it to {other} before {last}")


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether a dtype of floats has all values of another."""
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    one, other = torch.finfo(wide), torch.finfo(narrow)
    is_finer = one.eps <= other.eps and one.smallest_normal <= other.smallest_normal
    return is_finer and one.max >= other.max and one.bits > other.bits


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return all tensors in nested lists, in order."""
    found: list[torch.Tensor] = []
    for each in values:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += _tensors(each)
    return found


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operation writes."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += _tensors([value])
    return found


def _is_zero(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation writes nothing but zeros."""
    if func is torch.ops.aten.fill_.Scalar:
        return args[1] == 0
    return func is torch.ops.aten.zero_.default


def _returned(func: Any, written: list[torch.Tensor]) -> Any:
    """Return what an operation that writes its arguments would return."""
    if len(func._schema.returns) == 1:
        return written[0]
    return tuple(written) if func._schema.returns else None


def _to_meta(values: Sequence[Any]) -> list[Any]:
    return [
        each.to("meta")
        if isinstance(each, torch.Tensor)
        else _to_meta(each)
        if isinstance(each, list | tuple)
        else each
        for each in values
    ]
