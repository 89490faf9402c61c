"""The model's weights on their way out: whole, in the wire dtype, a layer at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from rl_dtensor_worker.fsdp import local_tensor
from rl_dtensor_worker.model import persistent_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn

NamedTensors = list[tuple[str, torch.Tensor]]

# Its name since torch 2.13, which warns of the other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_LAYER = re.compile(r"^.*?\.\d+\.")


class WeightMeta(NamedTuple):
    """What is known of a tensor before it is gathered."""

    name: str
    dtype: torch.dtype
    """On the wire."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


class ModelWeights:
    """The tensors of a sharded model, as often as wanted: a `rl_interfaces.WeightSource`.

    The trainer's side of vLLM's own weight-transfer engines takes it as well.

    What is shared between modules comes once, under its first name. Each tensor is cast to the
    wire dtype before it is gathered, so that no more than is sent crosses the network, and while
    a layer is handed out, the next one is being gathered.

    Args:
        model: The model; its parameters are read when they are iterated over, not before.
        wire_dtype: The dtype of every floating-point tensor on the wire; others keep theirs.
        device: Where the whole tensors are gathered.
    """

    def __init__(self, model: nn.Module, *, wire_dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self._wire_dtype = wire_dtype
        self._device = device

    def metadata(self) -> list[WeightMeta]:
        """Return name, wire dtype and full shape of every tensor, without moving any."""
        return [
            WeightMeta(name, self._dtype_of(tensor), tuple(tensor.shape))
            for name, tensor in persistent_state(self._model).items()
        ]

    def held_names(self) -> None:
        """Return None: every rank has all tensors once they are gathered."""

    def groups(self) -> list[list[str]]:
        """Return the names of what is gathered at a time, in the order of `metadata`."""
        names = (name for name, _, _ in self.metadata())
        return [list(group) for _, group in groupby(names, key=layer_of)]

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Yield names and whole tensors of each of `groups`. Every rank takes part."""
        tensors = iter(self)
        for group in self.groups():
            yield group, [tensor for _, tensor in islice(tensors, len(group))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole tensor in the order of `metadata`. Every rank takes part."""
        return self.gather(name for name, _, _ in self.metadata())

    @torch.no_grad()
    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole tensor of each of `names`. Every rank takes part.

        Raises:
            ValueError: There is no tensor of that name.
        """
        state = persistent_state(self._model)
        names = list(names)
        if unknown := [name for name in names if name not in state]:
            raise ValueError(f"there is no tensor {unknown[0]!r} in the model")
        # Two layers in flight: the one that is handed out, and the one that is gathered.
        pending: _Gather | None = None
        for _, group in groupby(names, key=layer_of):
            following = self._start(state, list(group))
            if pending is not None:
                yield from pending.finish()
            pending = following
        if pending is not None:
            yield from pending.finish()

    def _start(self, state: Mapping[str, torch.Tensor], names: list[str]) -> _Gather:
        return _Gather.start(
            [(name, state[name]) for name in names],
            [self._dtype_of(state[name]) for name in names],
            device=self._device,
        )

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self._wire_dtype if tensor.is_floating_point() else tensor.dtype


def layer_of(name: str) -> str:
    """Return what the names of one repeated block begin with, and "" for all other names.

    Example: "model.layers.3.mlp.up_proj.weight" -> "model.layers.3."
    """
    match = _LAYER.match(name)
    return match.group() if match else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """Where a sharded tensor lies in what every rank contributes."""

    start: int
    rows: int
    """Of the largest shard: all others are padded to it."""
    shape: torch.Size


@dataclass(kw_only=True, slots=True)
class _Gather:
    """The tensors of one layer, in one collective that is under way."""

    whole: dict[str, torch.Tensor]
    slots: dict[str, _Slot]
    names: list[str]
    gathered: torch.Tensor | None = None
    work: dist.Work | None = None

    @classmethod
    def start(
        cls, tensors: NamedTensors, dtypes: list[torch.dtype], *, device: torch.device
    ) -> _Gather:
        """Start to gather what is sharded; take the rest as it is."""
        gather = cls(whole={}, slots={}, names=[name for name, _ in tensors])
        sharded: list[tuple[DTensor, torch.dtype]] = []
        end = 0
        for (name, tensor), dtype in zip(tensors, dtypes, strict=True):
            if not _is_row_shard(tensor):
                gather.whole[name] = _whole(tensor, dtype, device)
                continue
            ranks = tensor.device_mesh.size()
            rows = -(-tensor.shape[0] // ranks)
            gather.slots[name] = _Slot(start=end, rows=rows, shape=tensor.shape)
            end += rows * tensor.shape[1:].numel()
            sharded.append((tensor, dtype))
        if sharded:
            gather._send(sharded, end, device)
        return gather

    def _send(
        self, sharded: list[tuple[DTensor, torch.dtype]], num_elements: int, device: torch.device
    ) -> None:
        ((dtype, mesh),) = {(dtype, tensor.device_mesh) for tensor, dtype in sharded}
        own = torch.empty(num_elements, dtype=dtype, device=device)
        for (tensor, _), slot in zip(sharded, self.slots.values(), strict=True):
            shard = local_tensor(tensor)
            own[slot.start : slot.start + shard.numel()].view(shard.shape).copy_(shard)
        self.gathered = torch.empty(mesh.size(), num_elements, dtype=dtype, device=device)
        self.work = _all_gather(self.gathered.view(-1), own, group=mesh.get_group(), async_op=True)

    def finish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the collective, and yield name and whole tensor."""
        if self.work is not None:
            self.work.wait()
        for name in self.names:
            slot = self.slots.get(name)
            if slot is None:
                yield name, self.whole[name]
                continue
            assert self.gathered is not None
            size = slot.rows * slot.shape[1:].numel()
            parts = self.gathered[:, slot.start : slot.start + size]
            rows = parts.reshape(len(parts) * slot.rows, *slot.shape[1:])
            yield name, rows[: slot.shape[0]]


def _is_row_shard(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether each rank of a mesh with one axis has some rows of the tensor."""
    return (
        isinstance(tensor, DTensor)
        and tensor.device_mesh.size() > 1
        and tuple(tensor.placements) == (Shard(0),)
    )


def _whole(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    cast = tensor.detach().to(device=device, dtype=dtype)
    return cast.full_tensor() if isinstance(cast, DTensor) else cast
