"""The model's weights on their way out: whole, in the wire dtype, a layer at a time."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

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
        group: The ranks that have parts of the tensors, each another one. None: nothing is cut.
        device: Where the whole tensors are gathered.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wire_dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._wire_dtype = wire_dtype
        self._group = group
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
            group=self._group,
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
class _Cut:
    """How a tensor lies on the ranks that have parts of it: rows over rows, over tensor parallel.

    Rank `d * tensor + t` has rows `d` of the part `t` of the tensor.
    """

    rows: int
    """Ranks over which FSDP cuts the first dimension."""
    tensor: int
    """Ranks that share the layer."""
    dim: int | None
    """The dimension that those cut; None where each has all of it."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Cut | None:
        """Return how `tensor` is cut; None where it is not, or in a way of its own."""
        if not isinstance(tensor, DTensor):
            return None
        sizes: dict[str, int] = {}
        dims: dict[str, int] = {}
        mesh = tensor.device_mesh
        for axis, placement in enumerate(tensor.placements):
            name = (mesh.mesh_dim_names or ("",) * mesh.ndim)[axis]
            sizes[name] = mesh.size(axis)
            if isinstance(placement, (Shard, _StridedShard)):
                dims[name] = placement.dim
        known = sizes.keys() <= {"dp_replicate", "dp_shard_cp", "tp"}
        if not known or dims.get("dp_shard_cp") != 0 or "dp_replicate" in dims:
            return None
        cut = cls(rows=sizes["dp_shard_cp"], tensor=sizes.get("tp", 1), dim=dims.get("tp"))
        return cut if cut._is_even(tensor.shape) else None

    @property
    def num_ranks(self) -> int:
        """How many ranks have parts."""
        return self.rows * self.tensor

    def part_shape(self, shape: torch.Size) -> list[int]:
        """Return the shape of what the ranks of one row group share, completed to equal rows."""
        part = list(shape)
        if self.dim is not None:
            part[self.dim] //= self.tensor
        part[0] = -(-part[0] // self.rows) * self.rows
        return part

    def join(self, parts: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the tensor whose parts are given, `[ranks, elements]`, each completed."""
        part = self.part_shape(shape)
        rows = part[0] // self.rows
        stacked = parts.view(self.rows, self.tensor, rows, *part[1:]).transpose(0, 1)
        num_rows = shape[0] // self.tensor if self.dim == 0 else shape[0]
        blocks = stacked.reshape(self.tensor, *part)[:, :num_rows]
        if self.tensor == 1 or self.dim is None:
            return blocks[0]
        return torch.cat(list(blocks), dim=self.dim)

    def _is_even(self, shape: torch.Size) -> bool:
        return self.num_ranks > 1 and (self.dim is None or shape[self.dim] % self.tensor == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """Where the part of a tensor lies in what every rank contributes."""

    start: int
    end: int
    shape: torch.Size
    """Of the whole tensor."""
    cut: _Cut


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
        cls,
        tensors: NamedTensors,
        dtypes: list[torch.dtype],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> _Gather:
        """Start to gather what is cut; take the rest as it is."""
        gather = cls(whole={}, slots={}, names=[name for name, _ in tensors])
        parts: list[tuple[torch.Tensor, torch.dtype]] = []
        end = 0
        for (name, tensor), dtype in zip(tensors, dtypes, strict=True):
            cut = _Cut.of(tensor)
            if cut is None or group is None or cut.num_ranks != group.size():
                gather.whole[name] = _whole(tensor, dtype, device)
                continue
            start, end = end, end + math.prod(cut.part_shape(tensor.shape)) // cut.rows
            gather.slots[name] = _Slot(start=start, end=end, shape=tensor.shape, cut=cut)
            parts.append((local_tensor(tensor), dtype))
        if parts and group is not None:
            gather._send(parts, end, group, device)
        return gather

    def _send(
        self,
        parts: list[tuple[torch.Tensor, torch.dtype]],
        num_elements: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        (dtype,) = {dtype for _, dtype in parts}
        own = torch.empty(num_elements, dtype=dtype, device=device)
        for (part, _), slot in zip(parts, self.slots.values(), strict=True):
            own[slot.start : slot.start + part.numel()].view(part.shape).copy_(part)
        self.gathered = torch.empty(group.size(), num_elements, dtype=dtype, device=device)
        self.work = _all_gather(self.gathered.view(-1), own, group=group, async_op=True)

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
            yield name, slot.cut.join(self.gathered[:, slot.start : slot.end], slot.shape)


def _whole(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    cast = tensor.detach().to(device=device, dtype=dtype)
    return cast.full_tensor() if isinstance(cast, DTensor) else cast
