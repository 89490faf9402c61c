"""Weight sources: where a sender reads its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

_BLOCK = re.compile(r"^.*?\.\d+\.")

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class WeightSource(Protocol):
    """The tensors of a model in a fixed order; can be iterated any number of times."""

    def metadata(self) -> Sequence[tuple[str, torch.dtype, Sequence[int]]]:
        """Return name, wire dtype and full shape of every tensor, without gathering one."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full tensor in the order of `metadata`.

        A tensor must keep its values while the next ones are read: small ones are copied together.
        """
        ...


class TensorSource:
    """The tensors of a state dict or of `model.named_parameters()`.

    Tied tensors, that is names of the same elements of the same storage, are sent once, under their
    first name: the engine ties them itself.

    Args:
        tensors: By name; values are read when they are sent.
    """

    def __init__(self, tensors: NamedTensors) -> None:
        pairs = dict(tensors)
        self._tensors: dict[str, torch.Tensor] = {}
        seen: set[tuple[object, ...]] = set()
        for name, tensor in pairs.items():
            # All empty tensors may share one address, so they do not count as tied.
            # The same bytes seen with another shape, stride or dtype are a tensor of their own.
            identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and identity in seen:
                continue
            seen.add(identity)
            self._tensors[name] = tensor.detach()

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return name, dtype and shape of every tensor."""
        return [(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor."""
        return iter(self._tensors.items())

    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each of `names`.

        Raises:
            ValueError: There is no tensor of that name.
        """
        names = list(names)
        if unknown := [name for name in names if name not in self._tensors]:
            raise ValueError(f"there is no tensor {unknown[0]!r} in the model")
        return ((name, self._tensors[name]) for name in names)


def block_of(name: str) -> str:
    """Return the prefix that the names of one repeated block share, "" for all other names.

    A worker gathers a block at a time, as the trainer's side of vLLM's own engines does.

    Example: "model.layers.3.mlp.up_proj.weight" -> "model.layers.3."
    """
    match = _BLOCK.match(name)
    return match.group() if match else ""
