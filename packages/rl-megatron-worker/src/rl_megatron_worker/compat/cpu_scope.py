"""Megatron-core without a GPU: one context manager, entered around each of its calls.

Megatron-core hard-codes CUDA in about forty places that do not depend on it: the device of a
buffer, the name of a tensor type, a stream to wait for. Inside the scope these resolve to the CPU;
kernels, collectives and schedules are those of a GPU run. Nothing is patched outside of the scope.

Two kinds of patches apply inside:

- Attributes of `torch.cuda`, of `torch.autograd`, and of two modules of Megatron-core (`Patches`).
  They are process-global: other threads see them while any thread is inside.
- A `TorchFunctionMode` that maps the device of torch calls (`_CudaMeansCpu`). It is thread-local:
  enter the scope in the thread that runs the step. The backward pass of CPU tensors runs in the
  calling thread, and so is covered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import package_info
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

from rl_megatron_worker.compat.patches import Patch, Patches

if TYPE_CHECKING:
    from collections.abc import Generator

_CPU = torch.device("cpu")
# The first version of each range that is supported, and the first after it.
_VERSIONS = [((0, 16, 1), (0, 17, 0)), ((0, 19, 2), (0, 20, 0))]


class _CudaMeansCpu(TorchFunctionMode):
    """Maps the device CUDA to the CPU in every torch call of this thread."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        # A hot path: hundreds of thousands of calls per minute, nearly all passed on unchanged.
        # torch disables the mode during this call, so the overrides below do not come back here.
        call = _OVERRIDES.get(func, func)
        if not kwargs:
            return call(*args)
        if _is_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": _CPU}
        # Page-locked memory exists for copies to a GPU; torch refuses to allocate it without one.
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        return call(*args, **kwargs)


def _stay(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return tensor


def _copy(tensor: torch.Tensor, *args: object) -> torch.Tensor:
    """Return a copy, as on CUDA: `_ParamAndGradBuffer.offload_to_cpu` frees the source storage."""
    return tensor.clone()


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> object:
    """Return CUDA's name of the type: Megatron-core compares it with `torch.cuda.FloatTensor`."""
    if args or kwargs:  # A cast, not a question.
        return tensor.type(*args, **kwargs)
    return tensor.type().replace("torch.", "torch.cuda.", 1)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    to: Callable[..., torch.Tensor] = tensor.to
    return to(*(_CPU if _is_cuda(each) else each for each in args), **kwargs)


# By the function that torch hands to the mode: methods are looked up on `torch.Tensor`.
_OVERRIDES: dict[Callable[..., object], Callable[..., object]] = {
    torch.Tensor.cuda: _stay,
    torch.Tensor.pin_memory: _copy,
    torch.Tensor.type: _type,
    torch.Tensor.to: _to,
}


class _Stream:
    """Stand-in for `torch.cuda.Stream`: on the CPU everything runs in the order of the calls.

    A class, not a factory: transformers evaluates `torch.cuda.Stream | None` at import.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Return at once."""

    def wait_event(self, event: object) -> None:
        """Return at once."""

    def record_event(self, event: _Event | None = None) -> _Event:
        """Return a completed event."""
        return event or _Event()

    def synchronize(self) -> None:
        """Return at once."""


class _Event:
    """Stand-in for `torch.cuda.Event`: complete as soon as it is recorded."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        """Return at once."""

    def wait(self, stream: object = None) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return that the event is complete."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


# The signatures below are those of the functions that they replace: some arguments are passed by
# keyword.


def _cpu_device() -> torch.device:
    return _CPU


def _nothing(device: object = None) -> None:
    pass


def _a_stream(device: object = None) -> _Stream:
    return _Stream()


def _enter_stream(stream: _Stream) -> _Stream:
    return stream


def _rng_state(
    device: object = None, clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(
    new_state: torch.Tensor, device: object = None, graph_safe: bool = False
) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    # Not `torch.manual_seed`, which seeds the generators of all devices.
    torch.default_generator.manual_seed(seed)


def _as_splits(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Return split sizes as numpy if asked for: 0.16.1 returns CPU tensors unconverted."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_run_backward: Callable[..., object] = torch.autograd.graph._engine_run_backward


def _run_backward_inside(*args: object, **kwargs: object) -> object:
    """Re-enter the mode for a backward pass: torch disables it while it handles `backward()`."""
    # The attribute is replaced for all threads; one outside of the scope keeps torch's behaviour.
    if not _patches.entered:
        return _run_backward(*args, **kwargs)
    with _CudaMeansCpu():
        return _run_backward(*args, **kwargs)


_PATCHES: list[Patch] = [
    (torch.autograd, "_engine_run_backward", _run_backward_inside),
    # Megatron-core passes its result on as a `device`, for which an index would not do.
    (torch.cuda, "current_device", _cpu_device),
    (torch.cuda, "synchronize", _nothing),
    (torch.cuda, "empty_cache", _nothing),
    # The all-to-all dispatcher and the reduction over optimizer instances create streams.
    (torch.cuda, "Stream", _Stream),
    (torch.cuda, "Event", _Event),
    (torch.cuda, "stream", _enter_stream),
    (torch.cuda, "current_stream", _a_stream),
    (torch.cuda, "default_stream", _a_stream),
    # Activation recomputation and dropout save, fork and restore these states.
    (torch.cuda, "get_rng_state", _rng_state),
    (torch.cuda, "set_rng_state", _set_rng_state),
    (torch.cuda, "manual_seed", _manual_seed),
    (megatron_random, "_get_cuda_rng_state", _rng_state),
    (megatron_random, "_set_cuda_rng_state", _set_rng_state),
    (token_dispatcher, "maybe_move_tensor_to_cpu", _as_splits),
]
_patches = Patches(_PATCHES)


@contextmanager
def cpu_scope() -> Generator[None, None, None]:
    """Let Megatron-core run on the CPU inside; a no-op if CUDA is available. Reentrant.

    Raises:
        RuntimeError: This version of megatron-core is not supported on the CPU.
    """
    if _patches.entered or torch.cuda.is_available():
        yield
        return
    check_megatron_is_known(package_info.VERSION[:3])
    with _patches.applied(), _CudaMeansCpu():
        yield


@functools.cache
def check_megatron_is_known(version: tuple[int, int, int]) -> None:
    """Raise `RuntimeError` if the version is not supported, or lacks an attribute to patch."""
    numbers = _dotted(version)
    if not any(first <= version < end for first, end in _VERSIONS):
        ranges = [f">={_dotted(first)},<{_dotted(end)}" for first, end in _VERSIONS]
        raise RuntimeError(
            f"megatron-core {numbers} is not one that can be run on the CPU: "
            f"install megatron-core{' or '.join(ranges)}"
        )
    missing = [f"{owner.__name__}.{name}" for owner, name, _ in _PATCHES if name not in vars(owner)]
    if missing:
        raise RuntimeError(
            f"megatron-core {numbers} with torch {torch.__version__} cannot be run on the CPU: "
            f"{', '.join(missing)} not found"
        )


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )
