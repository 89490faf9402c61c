"""The repeated layers of a model and the blocks inside them, and how blocks without a plan are run.

A block, such as an attention or a mixer, is what a decoder layer has between two residual sums.
Where a plan says nothing of a block, or something that is not supported, its linear layers are
sharded along their outputs, which are gathered, and the rest of it is replicated. That holds
whatever stands between the layers, and costs a gather per linear layer in place of one reduction
per block. The mixture's experts are sharded among the ranks.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from torch import nn
from transformers.pytorch_utils import Conv1D

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from transformers import PreTrainedModel

# Itself, hidden states and chosen experts; weights of these are the next.
_EXPERT_ARGUMENTS = 3
_PARAMETER_USE = re.compile(r"self\.(\w+)\.(?:weight|bias)\b")
COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
"""Styles of layers whose outputs are sharded."""
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
"""Styles of layers whose inputs are."""


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, without what FSDP puts before it."""
    return type(module).__name__.removeprefix("FSDP")


def decoder_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the model's repeated layers by name, whose classes `_no_split_modules` names.

    Without such a name they are those of the largest module list. Layers that share weights are
    left out, and of layers inside each other the inner ones.

    Raises:
        ValueError: The model has no such module.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    layers = {n: each for n, each in model.named_modules() if class_name(each) in classes}
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    if not classes and lists:
        largest = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))
        layers = {n: each for n, each in model.named_modules() if each in {*largest}}
    if not layers:
        raise ValueError(
            f"{class_name(model)} has no module named in _no_split_modules={sorted(classes)}: "
            "FSDP cannot shard its layers one by one"
        )
    # A weight is in one FSDP unit: what several layers have is gathered with the rest.
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    found: dict[str, nn.Module] = {}
    for name, layer in layers.items():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if not is_inside and all(uses[id(p)] == 1 for p in layer.parameters()):
            found[name] = layer
    return found


def blocks_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the parts of each decoder layer that have parameters, by name.

    Those of a module list one by one: a layer may have several attentions.
    """
    return {
        f"{name}.{inner}": block
        for name, layer in decoder_layers(model).items()
        for inner, block in _parts_of(layer)
        if next(block.parameters(), None) is not None
    }


def _parts_of(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in layer.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{inner}", each) for inner, each in child.named_children())
        else:
            yield name, child


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is one linear layer, with or without adapters."""
    return type(getattr(module, "base_layer", module)) in (nn.Linear, Conv1D)


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module has parameters of its own, beside those of its submodules."""
    return next(module.parameters(recurse=False), None) is not None


def inside(name: str, names: Iterable[str]) -> list[str]:
    """Return those of `names` that are the module `name` or one of its submodules."""
    return [each for each in names if each == name or each.startswith(f"{name}.")]


def unplanned_blocks(
    model: PreTrainedModel, styles: Mapping[str, object], unsupported: Iterable[str]
) -> list[str]:
    """Return the blocks that a plan does not shard as it stands.

    Args:
        model: The model, unsharded.
        styles: The plan's styles, by module name.
        unsupported: Names of modules and parameters whose styles are unknown.
    """
    unknown = list(unsupported)
    return [
        name
        for name, block in blocks_of(model).items()
        # A norm is replicated anyhow.
        if (next(block.children(), None) is not None or is_linear(block))
        and (
            not inside(name, styles)
            or inside(name, unknown)
            or _has_unnamed_parameters(name, block, styles)
        )
    ]


def undivided_blocks(model: PreTrainedModel, styles: Mapping[str, object], size: int) -> list[str]:
    """Return the blocks that a plan would share out unequally among `size` ranks."""
    return [
        name
        for name, block in blocks_of(model).items()
        if (planned := inside(name, styles))
        and (
            (_computes_heads(block) and not _divides_heads(model, size))
            or any(_shared_dim(model.get_submodule(each), styles[each]) % size for each in planned)
        )
    ]


def _computes_heads(block: nn.Module) -> bool:
    return "Attention" in class_name(block)


def _divides_heads(model: PreTrainedModel, size: int) -> bool:
    text = model.config.get_text_config()
    counts = [getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    return all(count % size == 0 for count in counts if isinstance(count, int))


def _shared_dim(module: nn.Module, style: object) -> int:
    """Return the size of what a style shares out; 0 if it does not."""
    if style == "moe_tp_experts":
        return int(module.num_experts)  # type: ignore[arg-type]
    if style in COLUMNS:
        return int(getattr(module, "out_features", 0))
    return int(getattr(module, "in_features", 0)) if style in ROWS else 0


def _has_unnamed_parameters(name: str, block: nn.Module, styles: Mapping[str, object]) -> bool:
    """Return whether a block has parameters without a style beside sharded layers.

    They may meet a shard of the activations, and then have a partial gradient on each rank.
    """
    for inner, module in block.named_modules(prefix=name):
        if not has_parameters(module) or inner in styles:
            continue
        if inside(inner, styles):
            return True
        parent = inner.rpartition(".")[0]
        beside = [other for other in styles if other.rpartition(".")[0] == parent]
        if any(styles[other] in COLUMNS for other in beside):
            return True
    return False


def gathered_styles(
    name: str, block: nn.Module, *, tensor_parallel_size: int, adapted: Iterable[str]
) -> dict[str, str]:
    """Return the styles of a block whose activations are full between its layers.

    Args:
        name: The block's name in the model.
        block: It.
        tensor_parallel_size: What sharded dims must be a multiple of.
        adapted: Names of the layers that have adapters.
    """
    found = {} if is_linear(block) else {name: "block"}
    with_adapters, used = set(adapted), _used_without_a_call(name, block)
    for inner, module in block.named_modules(prefix=name):
        if inner in used:
            continue
        # The layer below adapters has a style that follows from that of both together.
        linear = getattr(module, "base_layer", module) if inner in with_adapters else module
        if inner.rpartition(".base_layer")[0] in with_adapters:
            continue
        if type(linear) is nn.Linear and linear.out_features % tensor_parallel_size == 0:
            found[inner] = "colwise_gather_output"
        elif type(module) is Conv1D and module.nf % tensor_parallel_size == 0:
            found[inner] = "conv1d_gather_output"
        elif _is_experts(module, tensor_parallel_size):
            found[inner] = "moe_tp_experts"
    return found


def takes_choice(experts: nn.Module) -> bool:
    """Return whether experts take tokens with the experts chosen for each, not sorted ones.

    And know their number by the usual name, which sharding changes.
    """
    if not isinstance(getattr(experts, "num_experts", None), int):
        return False
    return len(inspect.signature(type(experts).forward).parameters) > _EXPERT_ARGUMENTS


def _used_without_a_call(name: str, block: nn.Module) -> set[str]:
    """Return the layers of a block whose parameters a module around them uses itself.

    As the kernels of state-space layers do. It is read in the source of its class.
    """
    found: set[str] = set()
    for outer, module in block.named_modules(prefix=name):
        if next(module.children(), None) is not None:
            leaves = _PARAMETER_USE.findall(_source_of(type(module)))
            found |= {f"{outer}.{leaf}" for leaf in leaves}
    return found


@functools.cache
def _source_of(module_class: type) -> str:
    """Return the source of a model's class and of its bases; empty where there is none."""
    bases = [each for each in module_class.__mro__ if not each.__module__.startswith("torch.")]
    found = ""
    for each in bases:
        # Builtins, and classes that were made at run time, have none.
        with suppress(OSError, TypeError):
            found += inspect.getsource(each)
    return found


def _is_experts(module: nn.Module, tensor_parallel_size: int) -> bool:
    """Return whether a module is a mixture's experts as transformers has them, in few tensors."""
    count = getattr(module, "num_experts", None)
    own = [parameter for _, parameter in module.named_parameters(recurse=False)]
    return (
        isinstance(count, int)
        and count % tensor_parallel_size == 0
        and takes_choice(module)
        and len(own) > 1
        and all(each.ndim > 1 and each.shape[0] == count for each in own)
    )
