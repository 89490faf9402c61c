"""`FakeDevice`: runs operators of a device as shapes alone, and counts what they would cost.

On CUDA, tensors on the host are real. Tensors on the device are FakeTensors, which have a shape, a
dtype and a device. Two kinds also keep their values: integers and booleans of at most `_MAX_KNOWN`
elements, so that lengths, plans and counts are real on the device too, and floats of at most
`_MAX_KNOWN_FLOATS` elements. Any other float counts as 0 where the host asks for it.

Where the CPU is the device, floats are created as FakeTensors, and so is what has more than
`_MAX_KNOWN` elements or comes from the meta device or a FakeTensor; other tensors are real.
"""

from __future__ import annotations

import math
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from rl_interfaces.backend.fake.shapes import infer, names_of

_aten = torch.ops.aten
_CPU = torch.device("cpu")
_MAX_KNOWN = 1 << 16
_MAX_KNOWN_FLOATS = 8
# `c10::cuda::CUDACachingAllocator` rounds every block up to a multiple of this.
_BLOCK_BYTES = 512
_KITS = ("rl_interfaces.testing.fake_cuda", "rl_interfaces.backend.fake")
# Between an operator and the line that calls it.
_DISPATCHERS = ("torch._", "torch.utils._", "torch.overrides", "torch.distributed.tensor._")
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)

# They return no tensor that is computed.
_HOST_ANSWERS = frozenset(
    {"_local_scalar_dense", "is_nonzero", "equal", "allclose"}
    | {"is_pinned", "_pin_memory", "pin_memory"}
)
# They allocate, or change a tensor's description: no kernel runs.
_WITHOUT_KERNEL = frozenset(
    {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view"}
    | {"scalar_tensor", "detach", "alias", "lift_fresh", "set_", "resize_", "record_stream"}
)
# Of floats that are all 0, which is what unknown ones count as.
_TRUE_OF_ZEROS = frozenset({"isfinite", "isclose", "all", "logical_not"})
# They take a tensor, and sizes of their own.
_SIZED = frozenset({"aten::new_empty", "aten::new_empty_strided", "aten::new_zeros"})
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


active: list[FakeDevice] = []
"""The device of the context that is entered: libraries keep streams in globals, beyond one."""


def computes_values() -> bool:
    """Return whether results can be compared: not where `fake_cpu` gives tensors shapes alone."""
    return not any(device.device_type == "cpu" for device in active)


@dataclass(frozen=True, slots=True)
class Sync:
    """A place in the code at which the host waits for the device."""

    kind: str
    """`read`: a value or a copy to the host. `upload`: a copy to the device that is not
    `non_blocking`, after which torch waits. `shape`: an operator whose output's size depends on
    values. `synchronize`: an explicit wait, of a stream, an event or the allocator."""
    module: str
    """The file, from the folder of its package on."""
    function: str
    line: int
    inside: str
    """The innermost line, if that is in another package."""

    def __str__(self) -> str:
        inside = f", in {self.inside}" if self.inside else ""
        return f"{self.module}:{self.line} {self.function} ({self.kind}{inside})"

    @property
    def place(self) -> str:
        """The source without its line, which every edit of the file moves."""
        return f"{self.module} {self.function} ({self.kind})"


@dataclass(slots=True)
class Figures:
    """What one phase costs on the device."""

    peak_bytes: int = 0
    """The most bytes that were allocated at one time, those from before the phase included."""
    live_bytes: int = 0
    """The bytes that are allocated at its end."""
    launches: int = 0
    """Kernels, one for each operator that computes on the device."""
    syncs: Counter[Sync] = field(default_factory=Counter[Sync])
    kernels: Counter[str] = field(default_factory=Counter[str])
    """The launches by operator."""
    left: list[str] = field(default_factory=list[str])
    """What an offload has left on the device, see `FakeDevice.allocated`."""

    @property
    def num_syncs(self) -> int:
        """How often the host waits for the device."""
        return self.syncs.total()


@cache
def _fake_mode() -> FakeTensorMode:
    """Return the mode of all devices: libraries keep tensors in globals, beyond one context."""
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    mode.cache_enabled = False  # `infer` remembers
    return mode


@dataclass(slots=True)
class _Block:
    """Memory of one storage."""

    what: str
    origin: Sync | None
    size: int = 0


class FakeDevice(TorchDispatchMode):
    """The dispatch mode of `fake_cuda`, and the counters of the device.

    Args:
        packages: Prefixes of the package names to which synchronisations are attributed: the
            innermost frame of one of them is reported.
        device_type: `cuda`, or `cpu` where the device is the host itself.
        has_cuda_kernels: Whether attention takes the kernels of CUDA, and collectives those of
            NCCL, also on the CPU.
    """

    def __init__(
        self,
        *,
        packages: Sequence[str] = ("rl_",),
        device_type: str = "cuda",
        has_cuda_kernels: bool = True,
    ) -> None:
        super().__init__()
        self.device_type = device_type
        self.has_cuda_kernels = has_cuda_kernels
        # Of waits and allocations; the host does not wait for itself.
        self._watches_lines = device_type != "cpu"
        self._fake = _fake_mode()
        self._packages = tuple(packages)
        self._blocks: weakref.WeakKeyDictionary[Any, _Block] = weakref.WeakKeyDictionary()
        self._figures = Figures()
        self._paused = False
        self.reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Maps this rank's integers to those of an all-reduce; None: they are the same.

        For code that asks what other ranks have, such as the layers of other pipeline stages.
        """
        self.received: torch.Tensor | None = None
        """What another rank sends where as many integers are received, such as a shape."""
        self.live_bytes = 0
        """The bytes that are allocated now."""
        self.peak_bytes = 0
        """The most since the last `reset_peak`, as `torch.cuda.max_memory_allocated` has it."""

    # Figures

    @contextmanager
    def phase(self) -> Generator[Figures, None, None]:
        """Count what the body costs; the value is complete when the body has ended.

            with device.phase() as figures:
                worker.train(batch, loss)
            print(figures.peak_bytes, figures.num_syncs)

        A phase inside another one counts to both in bytes, to the inner one alone otherwise.
        """
        outer, outer_peak = self._figures, self.peak_bytes
        figures = self._figures = Figures()
        self.peak_bytes = self.live_bytes
        try:
            yield figures
        finally:
            figures.peak_bytes, figures.live_bytes = self.peak_bytes, self.live_bytes
            self._figures, self.peak_bytes = outer, max(outer_peak, self.peak_bytes)

    def owns(self, device: Any) -> bool:
        """Return whether a device is this one."""
        return device is not None and torch.device(device).type == self.device_type

    def reset_peak(self) -> None:
        """Let the peak start from what is allocated now."""
        self.peak_bytes = self.live_bytes

    @contextmanager
    def uncounted(self) -> Generator[None, None, None]:
        """Count nothing inside: for what computes shapes by means of tensors."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def synchronised(self, kind: str) -> None:
        """Count a wait of the host at the innermost line of the watched packages."""
        if not self._paused and self._watches_lines:
            self._figures.syncs[self._caller(kind)] += 1

    def _caller(self, kind: str) -> Sync:
        frame, innermost = sys._getframe(2), ""
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            if module.startswith(_KITS):
                frame = frame.f_back
                continue
            watched = module.partition(".")[0].startswith(self._packages)
            # A backward pass runs in a thread of its own, which has none of the caller's lines.
            if watched or frame.f_back is None:
                return Sync(
                    kind, _short(frame), frame.f_code.co_name, frame.f_lineno, inside=innermost
                )
            if not innermost and not module.startswith(_DISPATCHERS):
                innermost = f"{_short(frame)}:{frame.f_lineno}"
            frame = frame.f_back
        raise AssertionError("a thread has an outermost frame")

    # Bytes

    def _count(self, tensor: torch.Tensor) -> None:
        if self.owns(tensor.device) and not self._paused:
            storage = tensor.untyped_storage()
            if storage not in self._blocks:
                what = f"{tensor.dtype} {list(tensor.shape)}" if self._watches_lines else ""
                origin = self._caller("allocation") if self._watches_lines else None
                self._blocks[storage] = block = _Block(what, origin)
                weakref.finalize(storage, self._free, block)
            self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew if it is one on the device."""
        block = self._blocks.get(storage)
        if block is None:
            return
        size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        self.live_bytes += size - block.size
        block.size = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _count_gloo_copy(self, name: str, args: tuple[Any, ...]) -> None:
        """Count what gloo's reduce-scatter takes: it all-reduces a copy of its input."""
        if "reduce_scatter" not in name or self.has_cuda_kernels or self._paused:
            return
        # `c10d` has the output first; `_c10d_functional` has no output among its arguments.
        inputs = _tensors_in(args[1:2]) or _tensors_in(args[:1])
        copied = sum(each.nbytes for each in inputs)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + copied)

    def _free(self, block: _Block) -> None:
        self.live_bytes -= block.size
        block.size = 0

    def allocated(self) -> list[str]:
        """Describe what is allocated now, the largest first: bytes, dtype, shape and origin."""
        blocks = sorted(self._blocks.values(), key=lambda block: block.size, reverse=True)
        return [
            f"{each.size} bytes, {each.what}, from {each.origin}" for each in blocks if each.size
        ]

    # Tensors

    def fake_of(self, tensor: torch.Tensor, device: torch.device | None = None) -> FakeTensor:
        """Return a FakeTensor like a real one, on its device or on another."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fake = FakeTensor(self._fake, meta, device or tensor.device)
        return _with_values(fake, tensor)

    def fake_like(self, fake: FakeTensor) -> FakeTensor:
        """Return a FakeTensor with the description and the values of `fake`, and its own memory."""
        meta = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        other = FakeTensor(self._fake, meta, fake.fake_device)
        values = _known(fake)
        self._count(other)
        return other if values is None else _with_values(other, values.clone())

    # Operators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = _tensors_in((args, kwargs))
        # DTensor and other wrappers come back with the tensors that they hold.
        if any(type(each) not in _PLAIN_TYPES for each in tensors):
            return NotImplemented
        fakes = [each for each in tensors if isinstance(each, FakeTensor)]
        if not fakes and not self._is_faked(func, tensors, args, kwargs):
            return self._counted(func(*args, **kwargs))
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        namespace, name = names_of(func)
        if namespace == "c10d":
            return self._communicate(func, args, kwargs)
        on_device = self.device_type != "cpu" and any(self.owns(each.device) for each in fakes)
        if name in _HOST_ANSWERS:
            return self._answer(name, args, fakes[0], on_device=on_device)
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            return self._copy_to_host(args, kwargs, on_device=on_device)
        self._check_devices(name, args)
        self._count_transfer(name, args, kwargs)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            args = self._with_integer_indices(name, args)
            tensors = _tensors_in((args, kwargs))
        out = self._compute(func, name, args, kwargs, tensors)
        self._count_gloo_copy(name, args)
        is_kernel = not func.is_view and name not in _WITHOUT_KERNEL
        if is_kernel and (on_device or self.owns(kwargs.get("device"))):
            self._launch(name)
        return out

    def _is_faked(
        self, func: Any, tensors: Sequence[torch.Tensor], args: Any, kwargs: dict[str, Any]
    ) -> bool:
        """Return whether an operator without FakeTensors is one of the device all the same."""
        device = kwargs.get("device")
        if self.device_type != "cpu":
            return self.owns(device)
        if device is not None and not self.owns(device):
            return False
        if tensors:
            # What is real is small, unless a tensor of another size is made of it.
            is_sized = func._schema.name in _SIZED and _num_created(args) > _MAX_KNOWN
            return is_sized or any(each.device.type == "meta" for each in tensors)
        return _num_created(args) > _MAX_KNOWN or _creates_floats(args, kwargs)

    def _counted(self, out: Any) -> Any:
        """Count real tensors where the host is the device."""
        if self.device_type == "cpu":
            for tensor in _tensors_in(out):
                if type(tensor) in _PLAIN_TYPES:
                    self._count(tensor)
        return out

    def _launch(self, name: str) -> None:
        if not self._paused:
            self._figures.launches += 1
            self._figures.kernels[name] += 1

    def _answer(
        self, name: str, args: tuple[Any, ...], tensor: torch.Tensor, *, on_device: bool
    ) -> Any:
        """Return what the host asks for: a number, or a property of pinned memory."""
        if name == "is_pinned":
            return True
        if name in ("_pin_memory", "pin_memory"):
            return args[0]
        if on_device:
            self.synchronised("read")
        return True if name in ("equal", "allclose") else _number(tensor)

    def _check_devices(self, name: str, args: tuple[Any, ...]) -> None:
        """Raise if lists of tensors mix devices, which FakeTensor does not look into."""
        if not name.startswith(("_foreach", "_fused", "_amp_foreach")):
            return
        lists = [each for each in args if isinstance(each, (list, tuple)) and _tensors_in(each)]
        for tensors in zip(*lists, strict=False):
            devices = {str(each.device) for each in tensors if each.ndim}
            if len(devices) > 1:
                raise RuntimeError(f"{name} of tensors on {sorted(devices)}")

    def _count_transfer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a copy between host and device that torch waits for."""
        if name == "_to_copy":
            source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
            waits = not kwargs.get("non_blocking")
        elif name == "copy_":
            source, target = args[1].device, args[0].device
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        else:
            return
        if waits and source.type != target.type:
            self.synchronised("read" if target.type == "cpu" else "upload")

    def _copy_to_host(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, on_device: bool
    ) -> torch.Tensor:
        """Fill a real tensor; unknown values leave it as it is."""
        target, source = args[:2]
        if on_device and not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
            self.synchronised("read")
        values = _values_of(source)
        return target if values is None else target.copy_(values)

    def _with_integer_indices(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace masks by the indices that they select, as CUDA's kernels do after a wait."""
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, torch.Tensor) and index.device != args[0].device:
                if index.device.type == "cuda":
                    raise RuntimeError(
                        f"an index on {index.device} into a tensor on {args[0].device}"
                    )
                self.synchronised("upload")
            if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            # A single value is filled in under the mask itself.
            if index.device.type == "cuda" and (name == "index" or args[2].numel() > 1):
                self.synchronised("shape")
            selected = _known(index) if isinstance(index, FakeTensor) else index
            if selected is None:
                selected = torch.ones(index.shape, dtype=torch.bool)
            found = selected.nonzero(as_tuple=True)
            indices += [self.fake_of(each, index.device) for each in found]
        return (args[0], indices, *args[2:])

    def _compute(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[torch.Tensor],
    ) -> Any:
        """Compute the shapes, and the values where all inputs are known."""
        target = kwargs.get("device")
        to_host = (
            target is not None and torch.device(target).type == "cpu" and not self.owns(target)
        )
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if isinstance(kwargs.get("generator"), torch.Generator):
            kwargs["generator"] = None
        fakes = {
            id(each): self.fake_of(each) for each in inputs if not isinstance(each, FakeTensor)
        }

        def faked(value: Any) -> Any:
            return fakes.get(id(value), value) if isinstance(value, torch.Tensor) else value

        values = _values(func, name, args, kwargs, inputs)
        given, given_kwargs = args, kwargs
        if fakes:
            given, given_kwargs = _tree_map(faked, args), _tree_map(faked, kwargs)
        try:
            out = infer(self._fake, func, given, given_kwargs)
        except DynamicOutputShapeException:
            self.synchronised("shape")
            if values is None:
                values = _values_of_ones(func, args, kwargs)
            device = next(each.device for each in inputs)
            out = tree_map(lambda each: self._fake_result(each, device), values)
        if values is None:
            _forget_written(func, args)
        return self._result(out, values, name, args, to_host=to_host, originals=fakes, given=inputs)

    def _fake_result(self, value: Any, device: torch.device) -> Any:
        return self.fake_of(value, device) if isinstance(value, torch.Tensor) else value

    def _result(
        self,
        out: Any,
        values: Any,
        name: str,
        args: tuple[Any, ...],
        *,
        to_host: bool,
        originals: dict[int, FakeTensor],
        given: Sequence[torch.Tensor],
    ) -> Any:
        """Attach the values to the outputs; what is small and on the host becomes real."""
        # Operators nest their outputs in nothing else.
        flat = out if isinstance(out, (list, tuple)) else [out]
        known = _leaves(values) if values is not None else [None] * len(flat)
        # An operator that writes in place returns its argument: the caller's own, real tensor.
        real_of = {
            id(fake): each for each in given if (fake := originals.get(id(each))) is not None
        }
        results: list[Any] = []
        for tensor, value in zip(flat, known, strict=True):
            if not isinstance(tensor, FakeTensor):
                results.append(tensor)
                continue
            if id(tensor) in real_of:
                results.append(real_of[id(tensor)])
                continue
            if isinstance(value, torch.Tensor):
                _with_values(tensor, value)
            elif _is_kept(tensor) and not tensor.is_floating_point() and _known(tensor) is None:
                value_of_zeros = _of_zeros(name, args)
                tensor._host_values = torch.full(  # type: ignore[attr-defined]
                    tensor.shape, value_of_zeros, dtype=tensor.dtype
                )
            self._count(tensor)
            if to_host and tensor.device.type == "cpu" and tensor.numel() <= _MAX_KNOWN:
                results.append(_real_of(tensor, value))
            else:
                results.append(tensor)
        return type(out)(results) if flat is out else results[0]

    # Collectives

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a collective returns whose other ranks have what this one has.

        A reduction leaves the values of this rank, a gather repeats them; see `reduce` and
        `received`.
        """
        tensors = _tensors_in((args, kwargs))
        devices = {str(each.device) for each in tensors}
        if len(devices) > 1:
            raise RuntimeError(f"{func._schema.name} of tensors on {sorted(devices)}")
        name = func._schema.name.partition("::")[2]
        self._count_gloo_copy(name, args)
        if name == "recv_":
            _share_values(tensors[0], self.received)
        elif name == "send":
            pass
        elif name == "allreduce_":
            self._reduce(tensors)
        elif name not in ("broadcast_", "barrier", "allreduce_coalesced_"):
            _gather_values(name, args)
        self._launch(name)
        return _returned(func, args)

    def _reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            values = _values_of(tensor)
            if values is None or tensor.is_floating_point():
                continue
            reduced = _table_of_all(values) if self.reduce is None else self.reduce(values)
            if isinstance(tensor, FakeTensor):
                tensor._host_values = reduced  # type: ignore[attr-defined]
            else:
                tensor.copy_(reduced)


def _table_of_all(values: torch.Tensor) -> torch.Tensor:
    """Repeat the row of this rank in a table that has one row for each rank, as a gather does."""
    own = values[values.flatten(1).any(1)] if values.ndim > 1 else values
    return own.expand_as(values).clone() if values.ndim > 1 and len(own) == 1 else values


def _short(frame: Any) -> str:
    """Return the file of a frame from the folder of its outermost package on."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return _within_package(frame.f_code.co_filename, package)


@cache
def _within_package(filename: str, package: str) -> str:
    parts = Path(filename).parts
    start = parts.index(package) if package in parts else -2
    return "/".join(parts[start:])


def describe_like(tensor: FakeTensor, other: FakeTensor) -> None:
    """Give `tensor` the device and the values of `other`."""
    tensor.fake_device = other.fake_device
    if _known(tensor) is not None:
        del tensor._host_values  # type: ignore[attr-defined]
    if (values := _known(other)) is not None:
        _with_values(tensor, values)


def _leaves(value: Any) -> list[Any]:
    """Return what an operator's arguments hold: they are nested in nothing else than these."""
    if isinstance(value, (tuple, list)):
        return [leaf for each in value for leaf in _leaves(each)]
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    return [value]


def _tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments with each leaf replaced, as torch's `tree_map`, which takes much longer."""
    if type(value) in (tuple, list):
        return type(value)([_tree_map(function, each) for each in value])
    if type(value) is dict:
        return {key: _tree_map(function, each) for key, each in value.items()}
    if isinstance(value, (tuple, list, dict)):
        return tree_map(function, value)
    return function(value)


def _tensors_in(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _append_tensors(values, found)
    return found


def _append_tensors(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for each in value:
            _append_tensors(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _append_tensors(each, found)


def _creates_floats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function without a tensor among its arguments returns one of floats."""
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return dtype.is_floating_point
    # Sizes are in a list; `arange` and `full` take numbers, whose type decides.
    numbers = [each for each in args if isinstance(each, (bool, int, float))]
    return not numbers or any(isinstance(each, float) for each in numbers)


def _num_created(args: tuple[Any, ...]) -> int:
    """Return the elements of a tensor whose sizes are among the arguments of its creation."""
    sizes = [each for each in _leaves(args) if type(each) is int]
    return math.prod(size for size in sizes if size > 0)


def _is_kept(tensor: torch.Tensor) -> bool:
    limit = _MAX_KNOWN_FLOATS if tensor.is_floating_point() else _MAX_KNOWN
    return tensor.numel() <= limit


def _known(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a FakeTensor, as a real tensor; None if they are unknown."""
    return getattr(tensor, "_host_values", None)


def _values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    return _known(tensor) if isinstance(tensor, FakeTensor) else tensor


def _with_values(fake: FakeTensor, values: torch.Tensor) -> FakeTensor:
    if _is_kept(values):
        fake._host_values = values  # type: ignore[attr-defined]
    return fake


def _of_zeros(name: str, args: tuple[Any, ...]) -> bool:
    """Return what an operator with integer or boolean results gives for floats that are all 0."""
    if name in _COMPARISONS:
        other = args[1] if len(args) > 1 and isinstance(args[1], (int, float)) else 0
        return _COMPARISONS[name](0, other)
    return name in _TRUE_OF_ZEROS


def _share_values(target: torch.Tensor, source: torch.Tensor | None) -> None:
    values = None if source is None else _values_of(source)
    if values is not None and values.shape == target.shape and values.dtype == target.dtype:
        target._host_values = values.clone()  # type: ignore[attr-defined]


def _number(tensor: torch.Tensor) -> float | int | bool:
    values = _known(tensor)
    if values is not None:
        return values.item()
    return 0.0 if tensor.is_floating_point() else torch.zeros((), dtype=tensor.dtype).item()


def on_host(fake: FakeTensor) -> torch.Tensor:
    """Return a real tensor with the values of `fake`; unknown ones are 0."""
    with _disable_current_modes():
        return _real_of(fake, None)


def _real_of(fake: FakeTensor, values: Any) -> torch.Tensor:
    known = values if isinstance(values, torch.Tensor) else _known(fake)
    if known is None:
        return torch.zeros(fake.shape, dtype=fake.dtype)
    # A copy, as one between devices always is: the device's own values may change later.
    return known.to(fake.dtype).clone()


def _values(
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[torch.Tensor],
) -> Any:
    """Return the operator's real result on the host; None if an input is unknown."""
    for each in inputs:
        if isinstance(each, FakeTensor) and _known(each) is None:
            return None
    if names_of(func)[0] != "aten":
        return None
    # A real argument that is written to would be written to twice.
    if not all(isinstance(each, FakeTensor) or _is_kept(each) for each in inputs):
        return None
    sizes = [each for each in _leaves((args, kwargs)) if type(each) is int]
    if not inputs and math.prod(size for size in sizes if size > 0) > _MAX_KNOWN:
        return None

    def real(value: Any) -> Any:
        return _values_of(value) if isinstance(value, torch.Tensor) else value

    given, options = _tree_map(real, args), _tree_map(real, kwargs)
    if options.get("device") is not None:
        options["device"] = _CPU
    options.pop("pin_memory", None)
    options.pop("non_blocking", None)
    out = func(*given, **options)
    if name.startswith(("empty", "new_empty")):
        out.zero_()
    if name in ("uniform_", "normal_", "rand", "randn", "bernoulli_"):
        return None
    return out


def _values_of_ones(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator with a data-dependent shape, as if nothing were masked."""

    def ones(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = _values_of(value)
        return torch.ones(value.shape, dtype=value.dtype) if known is None else known

    return func(*tree_map(ones, args), **tree_map(ones, kwargs))


def _forget_written(func: Any, args: tuple[Any, ...]) -> None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in _tensors_in(value):
                if isinstance(tensor, FakeTensor) and _known(tensor) is not None:
                    if tensor.is_floating_point():
                        del tensor._host_values  # type: ignore[attr-defined]
                    else:
                        _known(tensor).zero_()  # type: ignore[union-attr]


def _gather_values(name: str, args: tuple[Any, ...]) -> None:
    """Fill the outputs of a gather with this rank's values; forget those of other collectives."""
    outputs = _tensors_in(args[0])
    inputs = _tensors_in(args[1:2])
    values = _values_of(inputs[0]) if len(inputs) == 1 else None
    gathers = name.startswith(("allgather", "_allgather", "gather"))
    for output in outputs:
        if not isinstance(output, FakeTensor):
            continue
        if gathers and values is not None and values.numel() and _is_kept(output):
            copies = values.flatten().repeat(output.numel() // values.numel())
            output._host_values = copies.view(output.shape).clone()  # type: ignore[attr-defined]
        elif _known(output) is not None:
            del output._host_values  # type: ignore[attr-defined]


def _returned(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the outputs of a collective by its schema: its tensors, and a completed `Work`."""
    group = next(each for each in args if isinstance(each, torch.ScriptObject) and _is_group(each))
    with _disable_current_modes():
        work = torch.ops.c10d.barrier(torch.zeros(0), group, [], True, -1)
    returned = [work if "Work" in str(each.type) else args[0] for each in func._schema.returns]
    return returned[0] if len(returned) == 1 else tuple(returned)


def _is_group(value: torch.ScriptObject) -> bool:
    return str(value._type()).endswith("ProcessGroup")
