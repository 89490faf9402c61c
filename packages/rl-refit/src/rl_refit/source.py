"""Weight sources: where a sender reads its tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import NamedTuple, Protocol

import torch
from torch import nn

from rl_refit.plan import block_of

_EXTRA_STATE = "_extra_state"
"""The last part of the name under which a state dict has what `get_extra_state` returns."""

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Convert = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
"""Returns what the engine calls a tensor: none, one or several names, with the values of each."""


class WeightMeta(NamedTuple):
    """Metadata of a tensor, known before it is gathered."""

    name: str
    dtype: torch.dtype
    """The wire dtype."""
    shape: tuple[int, ...]
    """The full shape."""


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


class BlockwiseSource(ABC):
    """A `WeightSource` that vLLM's own weight-transfer engines take as well.

    `held_names`, `groups` and `iter_groups` are their calls.
    """

    @abstractmethod
    def metadata(self) -> Sequence[WeightMeta]:
        """Return name, wire dtype and full shape of every tensor, without moving any."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full tensor in the order of `metadata`."""

    def held_names(self) -> None:  # noqa: B027 - the answer is None
        """Return None: every rank has all tensors after the gather."""

    def groups(self) -> list[list[str]]:
        """Return the names of each block's tensors, in the order of `metadata`."""
        names = (meta.name for meta in self.metadata())
        return [list(group) for _, group in groupby(names, key=block_of)]

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Yield names and full tensors of each of `groups`."""
        tensors = iter(self)
        for group in self.groups():
            yield group, [tensor for _, tensor in islice(tensors, len(group))]


class TensorSource(BlockwiseSource):
    """The tensors of a state dict or of `model.named_parameters()`, each in full on this rank.

    Tied tensors, that is names of the same elements of the same storage, are sent once, under their
    first name: the engine ties them itself.

    Args:
        tensors: By name; values are read when they are sent.

    Raises:
        ValueError: A tensor is sharded.
    """

    def __init__(self, tensors: NamedTensors) -> None:
        pairs = dict(tensors)
        self._tensors: dict[str, torch.Tensor] = {}
        seen: set[tuple[object, ...]] = set()
        for name, tensor in pairs.items():
            if hasattr(tensor, "full_tensor"):
                raise ValueError(
                    f"{name} is a DTensor, of which this rank may hold a shard: give the module to "
                    "rl_refit.ModuleSource, which gathers it"
                )
            # All empty tensors may share one address, so they do not count as tied.
            # The same bytes seen with another shape, stride or dtype are a tensor of their own.
            identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and identity in seen:
                continue
            seen.add(identity)
            self._tensors[name] = tensor.detach()

    def metadata(self) -> list[WeightMeta]:
        """Return name, dtype and shape of every tensor."""
        return [WeightMeta(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]

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


class ModuleSource(BlockwiseSource):
    """The full tensors of a module, of plain tensors or of DTensors in any layout.

    That is what FSDP2 (`fully_shard`), tensor parallelism and the trainers on top of them make of a
    module. Each DTensor is gathered when its turn comes, so that a rank holds one full tensor at a
    time, and buckets. All ranks that share the module iterate, in the same order: each gives its
    source to a `RefitSender`, those without receivers with `num_receivers=0`.

    Tensors are those of the module's state dict, parameters and persistent buffers; what
    `get_extra_state` adds to it is left out. A tied parameter is sent once, under its first name.

    Args:
        module: The module; its state dict is read anew in each refit.
        dtype: The wire dtype of floating-point tensors; None: each keeps its own.
        convert: Called with name and full tensor in the wire dtype, when the engine's names or
            layouts are not the module's. For `metadata` it gets tensors on the meta device, so that
            names, dtypes and shapes must not depend on values.
        device: Where shards are moved before they are gathered, for shards that are offloaded to
            host memory while their process group is that of an accelerator; None: nowhere.

    Example:
        >>> import torch
        >>> source = ModuleSource(torch.nn.Linear(3, 2), dtype=torch.bfloat16)
        >>> [(meta.name, meta.shape) for meta in source.metadata()]
        [('weight', (2, 3)), ('bias', (2,))]
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        convert: Convert | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._module = module
        self._dtype = dtype
        self._convert = convert
        self._device = None if device is None else torch.device(device)

    def metadata(self) -> list[WeightMeta]:
        """Return name, wire dtype and full shape of every tensor, without gathering one.

        Raises:
            ValueError: Two tensors were converted to the same name.
        """
        metas: dict[str, WeightMeta] = {}
        for source, tensor in self._state().items():
            empty = torch.empty(tensor.shape, dtype=self._wire_dtype(tensor), device="meta")
            for name, converted in self._converted(source, empty):
                if name in metas:
                    raise ValueError(f"convert names a second tensor {name}, from {source}")
                metas[name] = WeightMeta(name, converted.dtype, tuple(converted.shape))
        return list(metas.values())

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full tensor in the order of `metadata`. Collective."""
        for name, tensor in self._state().items():
            yield from self._converted(name, self._full(tensor))

    def _state(self) -> dict[str, torch.Tensor]:
        # The state dict of FSDP2 has its shards, also after a forward pass that has left the full
        # parameters in the module. Its values are the parameters, whose identity tells ties: an
        # address does not, as a rank's shard may be empty.
        found: dict[int, str] = {}
        state: dict[str, torch.Tensor] = self._module.state_dict(keep_vars=True)
        for name, tensor in state.items():
            if name.rpartition(".")[2] != _EXTRA_STATE:
                found.setdefault(id(tensor), name)
        return {name: state[name].detach() for name in found.values()}

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        # Cast before the gather, for which a narrower wire dtype means fewer bytes.
        cast = tensor.to(device=self._device or tensor.device, dtype=self._wire_dtype(tensor))
        # Asked for its method, as importing DTensor takes longer than importing this package.
        gather: Callable[[], torch.Tensor] | None = getattr(cast, "full_tensor", None)
        return cast if gather is None else gather()

    def _converted(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        return ((name, tensor),) if self._convert is None else self._convert(name, tensor)

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype
