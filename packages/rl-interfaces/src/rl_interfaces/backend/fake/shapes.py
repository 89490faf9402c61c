"""`infer`: what an operator returns for FakeTensors, from an earlier call with inputs like these.

torch remembers the same, but to look it up takes several times as long as to make the outputs, and
it remembers neither lists nor what `_unsafe_view` returns, of which every linear layer has one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# They change a tensor's description in place, check the size of a storage, or keep a constant.
_NEVER = frozenset(
    {"set_", "resize_", "resize_as_", "as_strided", "as_strided_", "lift", "lift_fresh"}
    | {"lift_fresh_copy"}
)
_PLAIN = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout}
    | {torch.memory_format}
)

# From the inputs and the mode to an output.
_Recipe = Callable[[list[FakeTensor], FakeTensorMode], Any]
# None: that of these inputs cannot be said.
_recipes: dict[Any, _Recipe | None] = {}


@cache
def names_of(func: Any) -> tuple[str, str]:
    """Return an operator's namespace and name, which C++ would make anew each time."""
    namespace, _, name = func._schema.name.partition("::")
    return namespace, name


def infer(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what `func` returns under `mode`; all tensors among the arguments are FakeTensors."""
    inputs: list[FakeTensor] = []
    key = _key_of(func, args, kwargs, inputs)
    recipe = None if key is None else _recipes.get(key)
    if recipe is not None:
        return recipe(inputs, mode)
    with mode:
        out = func(*args, **kwargs)
    if key is not None and key not in _recipes:
        _recipes[key] = _recipe_of(out, inputs, mode)
    return out


def _key_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[FakeTensor]
) -> Any:
    """Return all that the shapes depend on, and fill `inputs`; None if there is more to it."""
    if not _is_remembered(func) or torch.is_inference_mode_enabled():
        return None
    key: list[Any] = [func, torch.get_default_dtype()]
    if not _describe(args, key, inputs):
        return None
    for name, value in kwargs.items():
        key.append(name)
        if not _describe((value,), key, inputs):
            return None
    return tuple(key)


@cache
def _is_remembered(func: Any) -> bool:
    namespace, name = names_of(func)
    return namespace == "aten" and name not in _NEVER and torch.Tag.inplace_view not in func.tags


def _describe(values: Any, key: list[Any], inputs: list[FakeTensor]) -> bool:
    """Append what describes the values; return False if that is not all about them."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor or kind is torch.nn.Parameter:
            if value.constant is not None or not _is_plain(value):
                return False
            inputs.append(value)
            key += (value.shape, value.stride(), value.storage_offset())
            key += (value.dtype, value.fake_device, value.requires_grad)
        elif kind is list or kind is tuple:
            key.append(len(value))
            if not _describe(value, key, inputs):
                return False
        elif kind in _PLAIN:
            key += (kind, value)  # 1 and 1.0 are equal, and give different dtypes
        else:
            return False
    return True


def _is_plain(tensor: torch.Tensor) -> bool:
    # Only complex numbers are conjugated, or negated, in their description.
    return tensor.layout is torch.strided and not tensor.dtype.is_complex


def _recipe_of(out: Any, inputs: list[FakeTensor], mode: FakeTensorMode) -> _Recipe | None:
    """Return what makes `out` anew from the inputs; None if that cannot be said."""
    if out is None:
        return lambda inputs, mode: None
    if isinstance(out, FakeTensor):
        return _recipe_of_tensor(out, inputs, mode)
    if type(out) not in (list, tuple) or not all(isinstance(each, FakeTensor) for each in out):
        return None
    own = [each.untyped_storage()._cdata for each in out]
    given = {each.untyped_storage()._cdata for each in inputs}
    if len({each for each in own if each not in given}) < sum(each not in given for each in own):
        return None  # outputs that share memory of their own
    parts = [_recipe_of_tensor(each, inputs, mode) for each in out]
    if not all(parts):
        return None
    kind = type(out)
    return lambda inputs, mode: kind([part(inputs, mode) for part in parts if part])


def _recipe_of_tensor(
    out: FakeTensor, inputs: list[FakeTensor], mode: FakeTensorMode
) -> _Recipe | None:
    storage, device = out.untyped_storage(), out.fake_device
    shape, stride, dtype = tuple(out.shape), out.stride(), out.dtype
    storages = [each.untyped_storage()._cdata for each in inputs]
    owners = [index for index, each in enumerate(storages) if each == storage._cdata]
    if len(owners) > 1 or device is None:
        return None  # of inputs that share memory another one may be the output's at the next time
    if owners and out is inputs[owners[0]]:
        (index,) = owners
        return lambda inputs, mode: inputs[index]
    if out.requires_grad or out.constant is not None or not _is_plain(out):
        return None
    if owners:
        (index,), offset = owners, out.storage_offset()

        def view(inputs: list[FakeTensor], mode: FakeTensorMode) -> FakeTensor:
            meta = torch.empty(0, dtype=dtype, device="meta")
            meta.set_(inputs[index].untyped_storage(), offset, shape, stride)
            return FakeTensor(mode, meta, device)

        recipe: _Recipe = view
    else:

        def create(inputs: list[FakeTensor], mode: FakeTensorMode) -> FakeTensor:
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return FakeTensor(mode, meta, device)

        recipe = create
    made = recipe(inputs, mode)
    is_same = (
        made.untyped_storage().nbytes() == storage.nbytes()
        and made.storage_offset() == out.storage_offset()
        and torch._C._dispatch_key_set(made) == torch._C._dispatch_key_set(out)
    )
    return recipe if is_same else None
