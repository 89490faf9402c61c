"""The plan of a refit: the order of the tensors, and the offset of each in its bucket.

It consists of integers and is computed from metadata alone, without any tensor.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch

ALIGNMENT = 256
"""Offsets are multiples of this number of bytes, like those of CUDA's allocator."""

SMALL_BUCKET_BYTES = 4 << 20
"""Two buffers of this size stay in the processor's cache from the writer to the reader."""

FORMAT = 2
"""Version of the packing; part of the hash, so that releases that pack differently do not agree."""

_NUMBERED_LAYER = re.compile(r"^(.*?\.\d+)\.")


def align(num_bytes: int) -> int:
    """Return `num_bytes`, rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype on the wire, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def layer_of(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number, or else its module.

    `model.layers.3.mlp.up.weight` belongs to `model.layers.3`, `lm_head.weight` to `lm_head`.
    """
    numbered = _NUMBERED_LAYER.match(name)
    return numbered.group(1) if numbered else name.rpartition(".")[0] or name


def block_of(name: str) -> str:
    """Return the prefix that the names of one repeated block share, "" for all other names.

    A worker gathers a block at a time, as the trainer's side of vLLM's own engines does.

    Example: "model.layers.3.mlp.up_proj.weight" -> "model.layers.3."
    """
    numbered = _NUMBERED_LAYER.match(name)
    return numbered.group() if numbered else ""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, wire dtype and full shape of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size on the wire, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {dtype_name(self.dtype)}{list(self.shape)}"


Metadata = Iterable[tuple[str, torch.dtype, Sequence[int]] | TensorSpec]


def read_specs(metadata: Metadata) -> tuple[TensorSpec, ...]:
    """Return the specs of tensors, given as tuples or as objects with name, dtype and shape."""
    return tuple(_read_spec(entry) for entry in metadata)


def _read_spec(entry: tuple[str, torch.dtype, Sequence[int]] | TensorSpec) -> TensorSpec:
    if isinstance(entry, tuple):
        name, dtype, shape = entry
        return TensorSpec(name, dtype, tuple(map(int, shape)))
    # vLLM's sources yield a class of their own with the same attributes.
    return TensorSpec(entry.name, entry.dtype, tuple(map(int, entry.shape)))


class WireSpec(msgspec.Struct, array_like=True):
    """A `TensorSpec` on the wire."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class WirePlan(msgspec.Struct, forbid_unknown_fields=True):
    """A plan on the wire: the receiver computes the buckets again and compares the hash."""

    bucket_bytes: int
    tensors: list[WireSpec]
    hash: str
    adapters_from: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous range of one tensor's bytes in one bucket.

    Attributes:
        tensor: Index of the tensor in the plan.
        start: Offset of the range in the tensor, in bytes.
        size: Its length in bytes.
        offset: Its offset in the bucket, in bytes.
        is_full: Whether it is the full tensor.
        has_layer: Whether the bucket holds all of the tensor's layer, so that a loader that
            collects a layer can be given a view.
    """

    tensor: int
    start: int
    size: int
    offset: int
    is_full: bool
    has_layer: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """The unit of sending.

    Attributes:
        index: Its position in the order of sending.
        pieces: Its content in the order of offsets, without overlap.
        nbytes: Its length, a multiple of the alignment; the gaps between pieces are zero.
    """

    index: int
    pieces: tuple[Piece, ...]
    nbytes: int

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The `[start, end)` ranges that no piece covers."""
        starts = [piece.offset for piece in self.pieces[1:]] + [self.nbytes]
        ends = [piece.offset + piece.size for piece in self.pieces]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


@dataclass(frozen=True, slots=True)
class RefitPlan:
    """Ordered tensors, packed into buckets.

    A layer is packed into one bucket if it fits, otherwise each of its modules that fits is. A
    tensor larger than a bucket is split. Two plans with the same `hash` put the same bytes at the
    same offsets.

    Attributes:
        specs: The tensors, in the order of sending.
        bucket_bytes: Largest size of a bucket.
        buckets: In the order of sending.
        hash: Of everything else.
        adapters_from: Index of the first tensor of an adapter: those before it are the base, and no
            bucket has tensors of both. None: there are no adapters.
    """

    specs: tuple[TensorSpec, ...]
    bucket_bytes: int
    buckets: tuple[Bucket, ...]
    hash: str
    adapters_from: int | None = None

    @classmethod
    def of(
        cls,
        metadata: Metadata,
        bucket_bytes: int = 256 << 20,
        *,
        adapters_from: int | None = None,
    ) -> RefitPlan:
        """Return the plan of the tensors of `metadata`, in that order.

        Args:
            metadata: Name, wire dtype and full shape of each tensor.
            bucket_bytes: Largest size of a bucket; rounded down to a multiple of 256.
            adapters_from: See `RefitPlan`.

        Raises:
            ValueError: A name appears twice, a shape is negative, `bucket_bytes` is below 256, or
                `adapters_from` is not the index of a tensor.
        """
        if bucket_bytes < ALIGNMENT:
            raise ValueError(f"bucket_bytes={bucket_bytes} is less than {ALIGNMENT}")
        specs = read_specs(metadata)
        _check_specs(specs)
        if adapters_from is not None and not 0 <= adapters_from < len(specs):
            raise ValueError(f"adapters_from={adapters_from} with {len(specs)} tensors")
        capacity = bucket_bytes // ALIGNMENT * ALIGNMENT
        buckets = _pack(specs, capacity, adapters_from)
        digest = _hash(specs, capacity, buckets, adapters_from)
        return cls(specs, capacity, buckets, digest, adapters_from)

    @property
    def first_adapter_bucket(self) -> int:
        """Index of the first bucket with adapters; the number of buckets if there are none."""
        start = self.adapters_from
        if start is None:
            return len(self.buckets)
        return next(each.index for each in self.buckets if each.pieces[0].tensor >= start)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, without gaps."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def largest_bucket(self) -> int:
        """The size that a buffer must have, in bytes."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    def label(self, bucket: Bucket) -> str:
        """Return the names of a bucket's first and last tensor, for messages."""
        first, last = (self.specs[bucket.pieces[i].tensor].name for i in (0, -1))
        return first if first == last else f"{first} .. {last}"

    def to_wire(self) -> WirePlan:
        """Return the plan on the wire."""
        tensors = [WireSpec(spec.name, dtype_name(spec.dtype), spec.shape) for spec in self.specs]
        return WirePlan(self.bucket_bytes, tensors, self.hash, self.adapters_from)

    @classmethod
    def from_wire(cls, wire: WirePlan) -> RefitPlan:
        """Return the plan of `to_wire`, packed again from its tensors.

        Raises:
            ValueError: A dtype is unknown on this side, or the hashes differ.
        """
        metadata = [(spec.name, parse_dtype(spec.dtype), spec.shape) for spec in wire.tensors]
        plan = cls.of(metadata, wire.bucket_bytes, adapters_from=wire.adapters_from)
        if plan.hash != wire.hash:
            raise ValueError(f"the sender's plan has the hash {wire.hash}, this side's {plan.hash}")
        return plan

    def __str__(self) -> str:
        lines = [
            f"{len(self.specs)} tensors, {self.nbytes} bytes, {len(self.buckets)} buckets "
            f"of at most {self.bucket_bytes} bytes, hash {self.hash[:16]}"
        ]
        lines += [
            f"  bucket {bucket.index}: {bucket.nbytes} bytes, {len(bucket.pieces)} pieces, "
            f"{self.label(bucket)}"
            for bucket in self.buckets
        ]
        return "\n".join(lines)


def default_bucket_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the default bucket size: an eighth of all bytes, between 8 and 256 MiB.

    With fewer buckets the first fill and the last load dominate, which overlap with nothing; with
    smaller buckets the messages dominate. A tensor of up to 256 MiB is not split, as most loaders
    need it in full. Receivers that copy `into` their own tensors are faster with
    `SMALL_BUCKET_BYTES`.
    """
    sizes = [spec.nbytes for spec in specs]
    wanted = max(sum(sizes) // 8, align(max(sizes, default=0)), 8 << 20)
    return min(wanted, 256 << 20)


def differences(expected: Sequence[TensorSpec], offered: Sequence[TensorSpec]) -> list[str]:
    """Return how the offered tensors differ from the expected ones, one sentence each."""
    wanted, given = ({spec.name: spec for spec in specs} for specs in (expected, offered))
    found = [f"{spec} is missing" for name, spec in wanted.items() if name not in given]
    found += [f"{spec} is unexpected" for name, spec in given.items() if name not in wanted]
    found += [
        f"{given[name]} is offered where {spec} is expected"
        for name, spec in wanted.items()
        if name in given and given[name] != spec
    ]
    return found


def _check_specs(specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"the tensor {spec.name} appears twice")
        if any(size < 0 for size in spec.shape):
            raise ValueError(f"the tensor {spec.name} has the shape {spec.shape}")
        seen.add(spec.name)


class _Packer:
    """Collects `(tensor, start, size, offset)` ranges into buckets of a capacity in bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.buckets: list[list[tuple[int, int, int, int]]] = []
        self.used = capacity

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def open_bucket(self) -> None:
        self.buckets.append([])
        self.used = 0

    def add(self, tensor: int, nbytes: int) -> None:
        """Place a tensor; it is split only if it is larger than a bucket."""
        if not self.buckets or self.free < align(nbytes) <= self.capacity:
            self.open_bucket()
        start = 0
        while True:
            if self.free == 0 and nbytes > start:
                self.open_bucket()
            size = min(self.free, nbytes - start)
            # Also for an empty tensor: it is delivered with its piece, so it needs one.
            self.buckets[-1].append((tensor, start, size, self.used))
            self.used += align(size)
            start += size
            if start == nbytes:
                return


def _pack(
    specs: Sequence[TensorSpec], capacity: int, adapters_from: int | None
) -> tuple[Bucket, ...]:
    packer = _Packer(capacity)
    start = len(specs) if adapters_from is None else adapters_from
    # The adapters of a layer are loaded apart from it.
    layers = [(index >= start, layer_of(spec.name)) for index, spec in enumerate(specs)]
    for (_, layer), group in itertools.groupby(range(len(specs)), key=layers.__getitem__):
        members = list(group)
        if members[0] == start and packer.buckets:
            packer.open_bucket()
        _place(packer, specs, members, layer)
    buckets_of_layer: dict[tuple[bool, str], set[int]] = {}
    for index, ranges in enumerate(packer.buckets):
        for tensor, *_ in ranges:
            buckets_of_layer.setdefault(layers[tensor], set()).add(index)

    def piece(tensor: int, start: int, size: int, offset: int) -> Piece:
        is_full = size == specs[tensor].nbytes
        has_layer = len(buckets_of_layer[layers[tensor]]) == 1
        return Piece(tensor, start, size, offset, is_full, has_layer)

    return tuple(
        Bucket(
            index,
            tuple(piece(*each) for each in ranges),
            max(align(offset + size) for _, _, size, offset in ranges),
        )
        for index, ranges in enumerate(packer.buckets)
    )


def _place(packer: _Packer, specs: Sequence[TensorSpec], group: list[int], path: str) -> None:
    """Place the tensors below `path` in one bucket if they fit, otherwise module by module.

    Engines fuse tensors of one module (`gate_proj` and `up_proj`) and keep the first ones until the
    last has arrived. So a module that does not fit into the open bucket begins a new one, even if
    it is larger than that.
    """
    size = sum(align(specs[index].nbytes) for index in group)
    is_layer = path == layer_of(specs[group[0]].name)
    if packer.used and packer.free < size and not (is_layer and size > packer.capacity):
        packer.open_bucket()
    if size <= packer.capacity or len(group) == 1:
        for index in group:
            packer.add(index, specs[index].nbytes)
        return
    depth = path.count(".") + 2
    paths = {index: ".".join(specs[index].name.split(".")[:depth]) for index in group}
    for inner, members in itertools.groupby(group, key=paths.__getitem__):
        _place(packer, specs, list(members), inner)


def _hash(
    specs: Sequence[TensorSpec],
    capacity: int,
    buckets: Sequence[Bucket],
    adapters_from: int | None,
) -> str:
    tensors = [[spec.name, dtype_name(spec.dtype), spec.shape] for spec in specs]
    # The offsets as well, so that releases that pack the same tensors differently disagree.
    offsets = [
        [bucket.nbytes, [[p.tensor, p.start, p.size, p.offset] for p in bucket.pieces]]
        for bucket in buckets
    ]
    values = [FORMAT, ALIGNMENT, capacity, adapters_from, tensors, offsets]
    text = json.dumps(values, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
