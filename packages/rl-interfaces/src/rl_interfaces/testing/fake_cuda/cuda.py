"""`fake_cuda`: the context in which a process is one rank of a job on CUDA devices that compute
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # both ask for CUDA while they are imported, and must find none
import torch._inductor.utils  # noqa: F401
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention.bias import CausalBias
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from rl_interfaces.testing.fake_cuda.device import FakeDevice

NUM_DEVICES = 8
_TOTAL_BYTES = 80 * 2**30
_aten = torch.ops.aten
# Libraries keep streams in globals, beyond the context in which they were made.
_active: list[FakeDevice] = []


@contextmanager
def fake_cuda(
    *, rank: int = 0, world_size: int = 1, packages: Sequence[str] = ("rl_",)
) -> Generator[FakeDevice, None, None]:
    """Be one rank of a job on CUDA devices that compute nothing, in groups that send nothing.

    The process has loaded the backend of `guard.py` before torch. Inside, `torch.cuda` is
    available, torchrun's environment variables are set, and the default process group exists.

    Args:
        rank: The rank that this process is.
        world_size: The ranks of the job; the other ones do not exist.
        packages: See `FakeDevice`.

    Yields:
        The counters, see `FakeDevice.phase`.
    """
    device = FakeDevice(packages=packages)
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    with ExitStack() as leaving:
        leaving.enter_context(mock.patch.dict(os.environ, environment))
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        leaving.callback(_leave_groups)
        for patches in (
            _torch_cuda(device),
            _tensor_surface(device),
            _groups(),
            _shape_inference(device),
            _attention(),
        ):
            leaving.enter_context(patches)
        # `torch.tensor(..., device="cuda")` then is a copy from the host, which the mode sees.
        torch._C._set_only_lift_cpu_tensors(True)
        leaving.callback(torch._C._set_only_lift_cpu_tensors, False)
        leaving.enter_context(device)
        _active.append(device)
        leaving.callback(_active.remove, device)
        yield device


def _waits(*_: object, **__: object) -> None:
    for device in _active:
        device.synchronised("synchronize")


def _leave_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _replaced(*replacements: tuple[Any, str, Any]) -> Generator[None, None, None]:
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


# torch.cuda


def _torch_cuda(device: FakeDevice) -> Any:
    """Replace the functions of `torch.cuda` that ask a driver."""

    class Stream:
        """A stream on which everything is done at once; waiting for it is counted."""

        device = torch.device("cuda", 0)
        cuda_stream = 0

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait_stream(self, stream: object) -> None:
            pass

        def wait_event(self, event: object) -> None:
            pass

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            _waits()

    class Event:
        """An event that has happened; waiting for it on the host is counted."""

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def record(self, *_: object) -> None:
            pass

        def wait(self, *_: object) -> None:
            pass

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            _waits()

        def elapsed_time(self, _: object) -> float:
            return 0.0

    def nothing(*_: object, **__: object) -> None:
        pass

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    @contextmanager
    def entered(value: Any = None) -> Generator[Any, None, None]:
        yield value

    properties = SimpleNamespace(
        uuid="0" * 8,
        name="fake",
        major=9,
        minor=0,
        total_memory=_TOTAL_BYTES,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 * 2**20,
        gcnArchName="",
    )
    surface: dict[str, Any] = {
        "is_available": always(True),
        "is_initialized": always(True),
        "_lazy_init": nothing,
        "device_count": always(NUM_DEVICES),
        "current_device": always(0),
        "set_device": nothing,
        "device": entered,
        "Stream": Stream,
        "Event": Event,
        "stream": entered,
        "current_stream": lambda *_, **__: Stream(),
        "default_stream": lambda *_, **__: Stream(),
        "synchronize": _waits,
        # It waits: freeing memory synchronises the device.
        "empty_cache": _waits,
        "memory_allocated": lambda *_: device.live_bytes,
        "memory_reserved": lambda *_: device.live_bytes,
        "max_memory_allocated": lambda *_: device.peak_bytes,
        "max_memory_reserved": lambda *_: device.peak_bytes,
        "reset_peak_memory_stats": lambda *_: device.reset_peak(),
        "mem_get_info": lambda *_: (_TOTAL_BYTES - device.live_bytes, _TOTAL_BYTES),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "initial_seed": always(0),
        "default_generators": tuple(torch.Generator() for _ in range(NUM_DEVICES)),
        "get_device_properties": always(properties),
        "get_device_capability": always((9, 0)),
        "get_device_name": always("fake"),
        "is_bf16_supported": always(True),
        "is_current_stream_capturing": always(False),
    }
    replacements = [(torch.cuda, name, value) for name, value in surface.items()]
    replacements += [
        (torch.cuda.random, name, surface[name]) for name in ("get_rng_state", "set_rng_state")
    ]
    return _replaced(*replacements)


# torch.Tensor


_DATA = torch.Tensor.data
_DATA_POINTER = torch.UntypedStorage.data_ptr
_RESIZE = torch.UntypedStorage.resize_
_TENSOR = torch.tensor
_SWAP = torch.utils.swap_tensors
_TO_LIST = torch.Tensor.tolist


def _tensor_surface(device: FakeDevice) -> Any:
    """Make FakeTensors follow what real tensors do beyond operators."""

    def move_onto(tensor: torch.Tensor, value: FakeTensor) -> None:
        """Make a real tensor fake, in place, so that references to it survive."""
        fake: torch.Tensor = device.fake_like(value)
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        _SWAP(tensor, fake)

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not isinstance(tensor, FakeTensor):
            if isinstance(value, FakeTensor):
                move_onto(tensor, value)
            else:
                _DATA.__set__(tensor, value)
            return
        taken = value if isinstance(value, FakeTensor) else device.fake_of(value)
        _DATA.__set__(tensor, taken)
        # C++ has exchanged the storage alone: device and values are attributes in Python.
        tensor.fake_device = taken.fake_device
        tensor.__dict__.pop("_host_values", None)
        if hasattr(taken, "_host_values"):
            tensor._host_values = taken._host_values  # type: ignore[attr-defined]

    def data_pointer(storage: torch.UntypedStorage) -> int:
        # Storages without data have no address; what is asked for is which one it is.
        return storage._cdata if storage.device.type == "meta" else _DATA_POINTER(storage)

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resized = _RESIZE(storage, size)
        device.resized(storage)
        return resized

    def tensor_of(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, (list, tuple)):
            data = tree_map(lambda each: each.item() if isinstance(each, FakeTensor) else each, data)
        return _TENSOR(data, *args, **kwargs)

    def to_list(tensor: torch.Tensor) -> Any:
        # torch reads a FakeTensor number by number, and a real one in one copy.
        return _TO_LIST(tensor.cpu())

    def swap(first: torch.Tensor, second: torch.Tensor) -> None:
        # `nn.Module.to` swaps FakeTensors, and sets the data of real tensors, whose identity,
        # and so every reference to them, survives the move.
        if isinstance(first, FakeTensor):
            set_data(first, second.detach())
        else:
            _SWAP(first, second)

    return _replaced(
        (torch.utils, "swap_tensors", swap),
        (torch.Tensor, "data", property(lambda tensor: _DATA.__get__(tensor), set_data)),
        (FakeTensor, "tolist", to_list),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (torch.UntypedStorage, "data_ptr", data_pointer),
        (torch.UntypedStorage, "resize_", resize),
        (torch, "tensor", tensor_of),
    )


# Process groups


def _groups() -> Any:
    """Give every further group the backend that sends nothing."""
    new_group = dist.new_group

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    from torch.distributed import device_mesh, distributed_c10d

    owners = [dist, distributed_c10d]
    owners += [device_mesh] if hasattr(device_mesh, "new_group") else []
    return _replaced(*((owner, "new_group", fake_group) for owner in owners))


# Libraries that treat FakeTensors in a way of their own


@contextmanager
def _shape_inference(device: FakeDevice) -> Generator[None, None, None]:
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        # DTensor makes full tensors up to learn their shapes: nothing of it happens on a device.
        with device.uncounted():
            return propagate(*args, **kwargs)

    replacements: list[tuple[Any, str, Any]] = [
        (ShardingPropagator, "_propagate_tensor_meta_non_cached", uncounted)
    ]
    try:
        from transformers import masking_utils
    except ImportError:
        pass
    else:
        # It takes a FakeTensor for a sign of tracing, and then makes masks that are not needed.
        replacements.append((masking_utils, "is_tracing", lambda *_, **__: False))
    with _replaced(*replacements):
        yield


# Attention: which kernel a GPU would take decides on the bytes


_SDPA = torch.nn.functional.scaled_dot_product_attention


def _attention() -> Any:
    return _replaced(
        (torch.nn.functional, "scaled_dot_product_attention", _attend),
        # A tensor without elements that carries two sizes; under a mode torch cannot subclass it.
        (CausalBias, "__new__", _new_causal_bias),
    )


def _new_causal_bias(cls: type[CausalBias], *_: object) -> CausalBias:
    with _disable_current_modes():
        return torch.Tensor.__new__(cls)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call the kernel that `sdp_utils.cpp` of torch would choose on CUDA."""
    if not query.is_cuda:
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
        return _SDPA(
            query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa, **options
        )
    if isinstance(attn_mask, CausalBias):
        is_causal, attn_mask = True, None
        if not _takes_flash(query) and enable_gqa:
            attn_mask, is_causal = torch.ones(query.shape[2], key.shape[2], device=query.device), False
    if attn_mask is None and _takes_flash(query):
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if not enable_gqa:
        needs_backward = query.requires_grad or key.requires_grad or value.requires_grad
        bias = None
        if attn_mask is not None:
            # The kernel takes a bias in the query's dtype, expanded to all heads.
            bias = torch.zeros_like(attn_mask, dtype=query.dtype)
            bias = bias.expand(*query.shape[:2], query.shape[2], key.shape[2])
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_backward, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
    )[0]


def _takes_flash(query: torch.Tensor) -> bool:
    return query.dtype in (torch.float16, torch.bfloat16)
