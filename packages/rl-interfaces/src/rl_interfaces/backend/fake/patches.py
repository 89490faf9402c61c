"""What torch and libraries do beside operators, so that it also holds for FakeTensors.

Each function is a context manager that replaces attributes inside; see `fake_cpu`, and
`rl_interfaces.testing.fake_cuda`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.optim.optimizer as torch_optimizer
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention.bias import CausalBias
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from rl_interfaces.backend.fake.device import FakeDevice, active, describe_like, on_host
from rl_interfaces.backend.runtime import variables_set

_ABSENT = object()
_aten = torch.ops.aten


@contextmanager
def one_rank(device: FakeDevice, *, rank: int, world_size: int) -> Generator[None, None, None]:
    """Be one rank of a job whose tensors are those of `device`, in groups that send nothing.

    torchrun's environment variables are set inside, and the default process group exists. The mode
    itself is not entered.

    Args:
        device: The device, which the replaced functions find in `active`.
        rank: The rank that this process is.
        world_size: The ranks of the job; the other ones do not exist.
    """
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    with ExitStack() as leaving:
        leaving.enter_context(variables_set(environment))
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        leaving.callback(_leave_groups)
        for patches in (
            _tensor_surface(),
            _groups(),
            _foreach_types(device),
            _shape_inference(device),
            _attention(device),
        ):
            leaving.enter_context(patches)
        active.append(device)
        leaving.callback(active.remove, device)
        yield


def _leave_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Generator[None, None, None]:
    """Have `owner.name` be another value inside, for each `(owner, name, value)`."""
    originals = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, original in originals:
            # What the owner inherits is seen again once its own attribute is gone.
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


# torch.Tensor


# The descriptor itself, whose type is that of its value for a type checker.
_DATA: Any = torch.Tensor.data
_DATA_POINTER = torch.UntypedStorage.data_ptr
_RESIZE = torch.UntypedStorage.resize_
_TENSOR = torch.tensor
_SWAP = torch.utils.swap_tensors
_TO_LIST = torch.Tensor.tolist


def _tensor_surface() -> Any:
    """Make FakeTensors follow what real tensors do beyond operators."""
    return replaced(
        (torch, "tensor", _tensor_of),
        (torch.Tensor, "data", property(lambda tensor: _DATA.__get__(tensor), _set_data)),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (FakeTensor, "tolist", _to_list),
        (FakeTensor, "numpy", lambda tensor: on_host(tensor).numpy()),
        (torch.UntypedStorage, "data_ptr", _data_pointer),
        (torch.UntypedStorage, "resize_", _resize),
        (torch.utils, "swap_tensors", _swap),
    )


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(tensor, FakeTensor):
        taken = value if isinstance(value, FakeTensor) else active[-1].fake_of(value)
        _DATA.__set__(tensor, taken)
        # C++ has exchanged the storage alone: device and values are attributes in Python.
        describe_like(tensor, taken)
    elif isinstance(value, FakeTensor):
        _become_fake(tensor, value)
    else:
        _DATA.__set__(tensor, value)


def _become_fake(tensor: torch.Tensor, value: FakeTensor) -> None:
    """Make a real tensor fake, in place, so that references to it survive."""
    fake: torch.Tensor = active[-1].fake_like(value)
    if isinstance(tensor, torch.nn.Parameter):
        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    _SWAP(tensor, fake)


def _swap(first: torch.Tensor, second: torch.Tensor) -> None:
    # `nn.Module.to` swaps FakeTensors. Of real tensors it sets the data, and every reference to
    # them survives the move.
    if isinstance(first, FakeTensor):
        _set_data(first, second.detach())
    else:
        _SWAP(first, second)


def _data_pointer(storage: torch.UntypedStorage) -> int:
    # Storages without data have no address; what is asked for is which one it is.
    return storage._cdata if storage.device.type == "meta" else _DATA_POINTER(storage)


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    resized = _RESIZE(storage, size)
    active[-1].resized(storage)
    return resized


def _to_list(tensor: FakeTensor) -> Any:
    # torch reads a FakeTensor number by number, and a real one in one copy.
    return _TO_LIST(on_host(tensor) if tensor.device.type == "cpu" else tensor.cpu())


def _tensor_of(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        data = tree_map(lambda each: each.item() if isinstance(each, FakeTensor) else each, data)
    return _TENSOR(data, *args, **kwargs)


# Process groups


def _groups() -> Any:
    """Give every further group the backend that sends nothing."""
    new_group = dist.new_group

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    from torch.distributed import device_mesh, distributed_c10d

    owners = [dist, distributed_c10d]
    owners += [device_mesh] if hasattr(device_mesh, "new_group") else []
    return replaced(*((owner, "new_group", fake_group) for owner in owners))


# Libraries that treat FakeTensors in a way of their own


def _foreach_types(device: FakeDevice) -> Any:
    """Let optimizers and norms take the kernels over lists of tensors, as for real tensors."""
    devices: list[tuple[Any, str, Any]] = []
    if device.device_type == "cpu" and device.has_cuda_kernels:
        # Optimizers take them by default on CUDA, where they make a list of temporary tensors.
        name = "_get_foreach_kernels_supported_devices"
        devices = [(each, name, lambda: ["cpu"]) for each in (torch_optimizer, _foreach_utils)]
    return replaced(
        *devices,
        *(
            (owner, "_foreach_supported_types", [*owner._foreach_supported_types, FakeTensor])
            for owner in (torch_optimizer, _foreach_utils)
        ),
    )


@contextmanager
def _shape_inference(device: FakeDevice) -> Generator[None, None, None]:
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        # DTensor makes full tensors up to learn their shapes: nothing of it happens on a device.
        # Its own mode for that is complete on the CPU, and cannot be mixed with the device's.
        hidden = _disable_current_modes() if device.device_type == "cpu" else nullcontext()
        with device.uncounted(), hidden:
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
    with replaced(*replacements):
        yield


# Attention: which kernel a GPU would take decides on the bytes


_SDPA = torch.nn.functional.scaled_dot_product_attention


def _attention(device: FakeDevice) -> Any:
    attend = _attend if device.has_cuda_kernels else _SDPA
    return replaced(
        (torch.nn.functional, "scaled_dot_product_attention", attend),
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
    if not active[-1].owns(query.device):
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
        return _SDPA(
            query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa, **options
        )
    if isinstance(attn_mask, CausalBias):
        # Flash attention aligns it to the lower right; the math kernel needs it as a mask.
        is_math = enable_gqa and not _takes_flash(query)
        sizes = (query.shape[2], key.shape[2])
        attn_mask = torch.ones(sizes, device=query.device) if is_math else None
        is_causal = not is_math
    if attn_mask is None and _takes_flash(query):
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if enable_gqa:
        # Neither fused kernel takes a mask and fewer key-value heads: all scores are made.
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )[0]
    needs_backward = query.requires_grad or key.requires_grad or value.requires_grad
    bias = None
    if attn_mask is not None:
        # The kernel takes a bias in the query's dtype, expanded to all heads.
        bias = torch.zeros_like(attn_mask, dtype=query.dtype)
        bias = bias.expand(*query.shape[:2], query.shape[2], key.shape[2])
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_backward, dropout_p, is_causal, scale=scale
    )[0]


def _takes_flash(query: torch.Tensor) -> bool:
    return query.dtype in (torch.float16, torch.bfloat16)
