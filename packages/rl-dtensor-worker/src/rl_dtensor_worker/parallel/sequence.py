"""Decoder layers as the places where sequence parallelism starts and ends.

Sequence parallelism shards activations from the embedding to the output layer, outside of blocks.
What a model itself does before, between and after its layers, such as positions, masks and views of
the shape of its tokens, then meets local sequences, which not every model's code expects. In such a
model sequences are sharded in runs of layers alone: layers of which each takes what the one before
returns. Into a run each rank takes its chunk of the hidden states, and of whatever else a layer is
given per token; out of it they are gathered.

Where the code of the layers themselves expects full sequences, these are gathered inside of each
layer as well. Activations are then sharded from layer to layer, which is what activation
checkpointing keeps.
"""

from __future__ import annotations

import inspect
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from rl_dtensor_worker.parallel.structure import decoder_layers, has_parameters, inside
from rl_dtensor_worker.parallel.styles import (
    SequenceScope,
    gather_sequences,
    scatter_sequences,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from transformers import PreTrainedModel

    from rl_dtensor_worker.parallel.styles import Forward, TensorParallel

_PROBED_TOKENS = 8


class LayerBoundary(NamedTuple):
    """A decoder layer in a run of layers that shard sequences."""

    tp: TensorParallel
    """The ranks that shard them."""
    starts: bool
    """Whether the layer is given full sequences."""
    ends: bool
    """Whether it has to return full ones."""
    per_token: frozenset[str]
    """The names of the arguments that have hidden states of each token."""

    def run(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's `forward` on what the scope of sequence parallelism says."""
        scope = self.tp.scope
        if not self.tp.shards_sequences or scope is SequenceScope.MODEL:
            return forward(*args, **kwargs)
        given = arguments_of(module, args, kwargs)
        local = _first_hidden(given, self.per_token).shape
        if self.starts:
            local = torch.Size((local[0], local[1] // self.tp.size, *local[2:]))
        if scope is SequenceScope.LAYERS:
            return self._run_sharded(forward, given, local)
        return self._run_full(forward, given, local)

    def _run_sharded(self, forward: Forward, given: dict[str, Any], local: torch.Size) -> Any:
        # What a layer before has returned is local already.
        chunks = {
            name: scatter_sequences(value, self.tp, local=local)
            for name, value in given.items()
            if name in self.per_token
        }
        with self.tp.in_layer():
            output = forward(**(given | chunks))
        return gather_sequences(output, self.tp, local=local) if self.ends else output

    def _run_full(self, forward: Forward, given: dict[str, Any], local: torch.Size) -> Any:
        # Those that a layer outside of the run has returned are full already.
        given = gather_sequences(given, self.tp, local=local)
        # Every rank computes the same inside, so that gradients are full and none is summed.
        with self.tp.unsharded_sequences():
            output = forward(**given)
        return output if self.ends else scatter_sequences(output, self.tp, local=local)


class Call(NamedTuple):
    """One call of a layer in a forward."""

    name: str
    given: dict[str, Any]
    output: torch.Tensor
    """The first one."""
    is_next: bool
    """Whether no module outside of the layers has run since the one before."""


@torch.no_grad()
def shard_in_layers(model: PreTrainedModel, tp: TensorParallel) -> int:
    """Prepare a model for the scopes beside the whole model; return the longest run of layers.

    Two forwards on a few tokens, in which sequences are not sharded, say which layers follow each
    other and what they are given per token. Collective.

    Args:
        model: The model, in eval mode.
        tp: The ranks that shard sequences.
    """
    with tp.unsharded_sequences():
        calls, others = (_calls(model, reverse=reverse) for reverse in (False, True))
    per_token: dict[str, set[str]] = {}
    for call, other in zip(calls, others, strict=True):
        found = {n for n, value in call.given.items() if _differs(value, other.given.get(n))}
        per_token[call.name] = per_token.get(call.name, set()) | found
    calls = [call for call in calls if per_token[call.name]]
    joined = [
        after.is_next and _first_hidden(after.given, per_token[after.name]) is before.output
        for before, after in pairwise(calls)
    ]
    names = [call.name for call in calls]
    starts, ends = run_edges(names, joined)
    for name in dict.fromkeys(names):
        layer = model.get_submodule(name)
        boundary = LayerBoundary(tp, name in starts, name in ends, frozenset(per_token[name]))
        layer.forward = partial(boundary.run, layer, layer.forward)
    longest = length = 0
    for name in names:
        length = 1 if name in starts else length + 1
        longest = max(longest, length)
    return longest


def run_edges(names: Sequence[str], joined: Sequence[bool]) -> tuple[set[str], set[str]]:
    """Return the layers that start a run, and those that end one.

    A layer that is called several times starts, or ends, a run each time if it does so once.

    Args:
        names: The layers in the order of their calls.
        joined: Whether each but the first is given what the one before returns.

    Example, a module between two of four layers:
        run_edges(["0", "1", "2", "3"], [True, False, True]) = {"0", "2"}, {"1", "3"}
    """
    starts, ends = set(names[:1]), set(names[-1:])
    count = 0
    while len(starts) + len(ends) > count:
        count = len(starts) + len(ends)
        for (one, after), is_joined in zip(pairwise(names), joined, strict=True):
            if not is_joined or one in ends or after in starts:
                ends.add(one)
                starts.add(after)
    return starts, ends


def repeated_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the members of module lists that are, or contain, a decoder layer, by name."""
    found: dict[str, nn.Module] = {}
    for name in decoder_layers(model):
        parts = name.split(".")
        for depth in range(len(parts), 0, -1):
            if isinstance(model.get_submodule(".".join(parts[: depth - 1])), nn.ModuleList):
                inner = ".".join(parts[:depth])
                found[inner] = model.get_submodule(inner)
                break
    return found


def arguments_of(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a module's forward by name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _calls(model: PreTrainedModel, *, reverse: bool) -> list[Call]:
    """Return the calls of layers in a forward on one row of a few tokens."""
    found: list[Call] = []
    outside: list[nn.Module] = []
    layers = repeated_layers(model)

    def record(
        name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        found.append(Call(name, arguments_of(layer, args, kwargs), first, not outside))
        outside.clear()

    hooks = [
        layer.register_forward_hook(partial(record, name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    hooks += [
        module.register_forward_pre_hook(lambda each, _: outside.append(each))
        for name, module in model.named_modules()
        if has_parameters(module) and not any(inside(layer, [name]) for layer in layers)
    ]
    tokens = torch.arange(1, _PROBED_TOKENS + 1, device=next(model.parameters()).device)
    tokens = tokens % model.config.get_text_config().vocab_size
    try:
        model(input_ids=(tokens.flip(0) if reverse else tokens)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _differs(value: object, other: object) -> bool:
    """Return whether a value is hidden states that differ between two rows of tokens."""
    return (
        isinstance(value, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and value.is_floating_point()
        and value.ndim > 2
        and value.shape[1] == _PROBED_TOKENS
        and not torch.equal(value, other)
    )


def _first_hidden(given: Mapping[str, Any], per_token: Collection[str]) -> torch.Tensor:
    return next(value for name, value in given.items() if name in per_token)
