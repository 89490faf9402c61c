"""Megatron-core where there is no GPU: one context manager, entered around each of its calls.

Megatron-core asks for CUDA in about forty places that have nothing to do with what it computes:
the device of a buffer, the name of a tensor's type, a stream to wait for. Within the scope these
get the CPU; its kernels, collectives and schedules are the same ones as on a GPU. Nothing is
patched before the scope is entered, and nothing stays patched after it is left.

Two kinds of things change inside:

- Attributes of `torch.cuda`, of `torch.autograd`, and of two modules of Megatron-core (`Patches`).
  They are the process's, so other threads see them too, for as long as any thread is inside.
- What torch's own calls do with CUDA as a device (`_CudaMeansCpu`). Torch keeps this per thread:
  enter the scope in the thread that runs the step. The backward pass of CPU tensors runs in the
  thread that calls it, and so is covered.
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
_FIRST_VERSION, _END_VERSION = (0, 16, 1), (0, 17, 0)


class _CudaMeansCpu(TorchFunctionMode):
    """Lets torch's calls in this thread run on the CPU where they name CUDA."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Hundreds of thousands of calls in a minute, of which nearly all are let through.
        call = _CALLS_OF_THEIR_OWN.get(func, func)
        if not kwargs:
            return call(*args)
        if _is_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        return call(*args, **kwargs)


def _stay(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _copy(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """Return a copy, as on CUDA: the caller may free the storage of what it has pinned."""
    return tensor.clone()


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the name that CUDA has for it: Megatron-core asks whether it can compute with it."""
    if args or kwargs:
        return tensor.type(*args, **kwargs)
    return tensor.type().replace("torch.", "torch.cuda.", 1)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    to: Callable[..., torch.Tensor] = tensor.to
    return to(*(_CPU if _is_cuda(each) else each for each in args), **kwargs)


_CALLS_OF_THEIR_OWN: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.cuda: _stay,
    torch.Tensor.pin_memory: _copy,
    torch.Tensor.type: _type,
    torch.Tensor.to: _to,
}


class _Stream:
    """CUDA's streams, where everything runs in the order of the calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has happened."""
        return event or _Event()

    def synchronize(self) -> None:
        """Return at once."""


class _Event:
    """CUDA's events, where everything recorded has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Return at once."""

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return that it has happened."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


def _cpu_device() -> torch.device:
    return _CPU


def _nothing(device: Any = None) -> None:
    pass


def _a_stream(device: Any = None) -> _Stream:
    return _Stream()


def _enter_stream(stream: Any) -> Any:
    return stream


def _rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _as_splits(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the split sizes of an all-to-all as what it takes: numpy, where that is asked for."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_run_backward: Callable[..., Any] = torch.autograd.graph._engine_run_backward


def _run_backward_inside(*args: Any, **kwargs: Any) -> Any:
    """Run a backward pass inside the mode, which torch leaves for the time of each of its calls."""
    if not _patches.entered:
        return _run_backward(*args, **kwargs)
    with _CudaMeansCpu():
        return _run_backward(*args, **kwargs)


_PATCHES: list[Patch] = [
    (torch.autograd, "_engine_run_backward", _run_backward_inside),
    (torch.cuda, "current_device", _cpu_device),
    (torch.cuda, "synchronize", _nothing),
    (torch.cuda, "empty_cache", _nothing),
    (torch.cuda, "Stream", _Stream),
    (torch.cuda, "Event", _Event),
    (torch.cuda, "stream", _enter_stream),
    (torch.cuda, "current_stream", _a_stream),
    (torch.cuda, "default_stream", _a_stream),
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
    """Let Megatron-core run on the CPU inside; changes nothing where CUDA is available.

    A thread that is inside may enter again, which does nothing.

    Raises:
        RuntimeError: The insides of this megatron-core are not known.
    """
    if _patches.entered or torch.cuda.is_available():
        yield
        return
    check_megatron_is_known(package_info.VERSION[:3])
    with _patches.applied(), _CudaMeansCpu():
        yield


@functools.cache
def check_megatron_is_known(version: tuple[int, int, int]) -> None:
    """Raise `RuntimeError` unless what the scope changes is there, in a version that it knows."""
    numbers, first, end = (
        ".".join(map(str, each)) for each in (version, _FIRST_VERSION, _END_VERSION)
    )
    if not _FIRST_VERSION <= version < _END_VERSION:
        raise RuntimeError(
            f"megatron-core {numbers} is not one that can be run on the CPU: "
            f"install megatron-core>={first},<{end}"
        )
    missing = [f"{owner.__name__}.{name}" for owner, name, _ in _PATCHES if name not in vars(owner)]
    if missing:
        raise RuntimeError(
            f"megatron-core {numbers} with torch {torch.__version__} cannot be run on the CPU: "
            f"{', '.join(missing)} not found"
        )


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )
