"""What is sent, in which order and where it lies: a plan of integers, made from metadata alone."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ALIGNMENT = 256
"""Every tensor begins at a multiple of this many bytes: a cache line's and a kernel's delight."""

SMALL_BUCKET_BYTES = 4 << 20
"""Two such buffers stay in a processor's cache, between one side that writes and one that reads."""

FORMAT = 1
_NUMBERED_LAYER = re.compile(r"^(.*?\.\d+)\.")


def align(num_bytes: int) -> int:
    """Return `num_bytes`, rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as it stands on the wire: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def layer_of(name: str) -> str:
    """Return the layer a tensor belongs to: up to the first number in its name, or its module.

    `model.layers.3.mlp.up.weight` belongs to `model.layers.3`, `lm_head.weight` to `lm_head`.
    """
    numbered = _NUMBERED_LAYER.match(name)
    return numbered.group(1) if numbered else name.rpartition(".")[0] or name


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, wire dtype and full shape of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes on the wire."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {dtype_name(self.dtype)}{list(self.shape)}"


Metadata = Iterable[tuple[str, torch.dtype, Sequence[int]] | TensorSpec]


def read_specs(metadata: Metadata) -> tuple[TensorSpec, ...]:
    """Return the specs of tensors; anything with a name, a dtype and a shape is one."""
    return tuple(_read_spec(entry) for entry in metadata)


def _read_spec(entry: tuple[str, torch.dtype, Sequence[int]] | TensorSpec) -> TensorSpec:
    if isinstance(entry, tuple):
        name, dtype, shape = entry
        return TensorSpec(name, dtype, tuple(map(int, shape)))
    # vLLM's sources have a class of their own with the same attributes.
    return TensorSpec(entry.name, entry.dtype, tuple(map(int, entry.shape)))


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one tensor in one bucket.

    Attributes:
        tensor: Index of the tensor in the plan.
        start: Where the run begins in the tensor, in bytes.
        size: Its length in bytes.
        offset: Where it lies in the bucket.
        whole: Whether it is the whole tensor.
        in_place: Whether the bucket has the whole layer, so that a loader that waits for a
            layer may be handed a view.
    """

    tensor: int
    start: int
    size: int
    offset: int
    whole: bool
    in_place: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is sent at once.

    Attributes:
        index: Its place in the order of sending.
        pieces: What lies in it, in order, without overlap.
        nbytes: Its length, a multiple of the alignment; gaps between the pieces are zero.
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
    """Ordered tensors, cut into buckets.

    Layers are kept together where a bucket holds one, else their modules are; a tensor larger than
    a bucket is split. Two plans with the same `hash` put the same bytes into the same places.
    """

    specs: tuple[TensorSpec, ...]
    bucket_bytes: int
    buckets: tuple[Bucket, ...]
    hash: str

    @classmethod
    def of(
        cls,
        metadata: Metadata,
        bucket_bytes: int = 256 << 20,
    ) -> RefitPlan:
        """Return the plan for the tensors of `metadata`, in that order.

        Args:
            metadata: Name, wire dtype and full shape of each tensor.
            bucket_bytes: The most bytes of a bucket; rounded down to a multiple of 256.

        Raises:
            ValueError: A name comes twice, a shape is negative, or a bucket is too small.
        """
        if bucket_bytes < ALIGNMENT:
            raise ValueError(f"bucket_bytes={bucket_bytes} is less than {ALIGNMENT}")
        specs = read_specs(metadata)
        _check_specs(specs)
        capacity = bucket_bytes // ALIGNMENT * ALIGNMENT
        buckets = _cut(specs, capacity)
        return cls(specs, capacity, buckets, _hash(specs, capacity, buckets))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, without gaps."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def largest_bucket(self) -> int:
        """The bytes a buffer must have."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    def label(self, bucket: Bucket) -> str:
        """Return the names of a bucket's first and last tensor, for a message."""
        first, last = (self.specs[bucket.pieces[i].tensor].name for i in (0, -1))
        return first if first == last else f"{first} .. {last}"

    def to_wire(self) -> dict[str, Any]:
        """Return the plan as lists, strings and integers."""
        tensors = [[spec.name, dtype_name(spec.dtype), list(spec.shape)] for spec in self.specs]
        return {"bucket_bytes": self.bucket_bytes, "tensors": tensors, "hash": self.hash}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> RefitPlan:
        """Return the plan of `to_wire`, made anew from its tensors.

        Raises:
            ValueError: The hash is not that of the plan made here.
        """
        metadata = [(name, parse_dtype(dtype), shape) for name, dtype, shape in wire["tensors"]]
        plan = cls.of(metadata, wire["bucket_bytes"])
        if plan.hash != wire["hash"]:
            raise ValueError(f"the plan's hash is {wire['hash']} there and {plan.hash} here")
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


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def default_bucket_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the bucket size for these tensors: an eighth of all, within 8 and 256 MiB.

    With fewer buckets the first fill and the last load, which overlap with nothing, take up too
    much of the time; with smaller ones the messages do. A tensor is not split for it, as a loader
    wants it whole; where receivers copy what comes `into` their own, take `SMALL_BUCKET_BYTES`.
    """
    sizes = [spec.nbytes for spec in specs]
    wanted = max(sum(sizes) // 8, align(max(sizes, default=0)), 8 << 20)
    return min(wanted, 256 << 20)


def differences(expected: Sequence[TensorSpec], offered: Sequence[TensorSpec]) -> list[str]:
    """Return how the tensors offered differ from those expected, one sentence each."""
    wanted, given = ({spec.name: spec for spec in specs} for specs in (expected, offered))
    found = [f"{spec} is missing" for name, spec in wanted.items() if name not in given]
    found += [f"{spec} is unexpected" for name, spec in given.items() if name not in wanted]
    found += [
        f"{given[name]} comes where {spec} is expected"
        for name, spec in wanted.items()
        if name in given and given[name] != spec
    ]
    return found


def _check_specs(specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"the tensor {spec.name} comes twice")
        if any(size < 0 for size in spec.shape):
            raise ValueError(f"the tensor {spec.name} has the shape {spec.shape}")
        seen.add(spec.name)


class _Cutter:
    """Collects `(tensor, start, size, offset)` runs into buckets of a capacity."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.runs: list[list[tuple[int, int, int, int]]] = []
        self.used = capacity

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def cut(self) -> None:
        self.runs.append([])
        self.used = 0

    def add(self, tensor: int, nbytes: int) -> None:
        """Put a tensor where there is room; cut for it, and split it only if no bucket holds it."""
        if not self.runs or self.free < align(nbytes) <= self.capacity:
            self.cut()
        start = 0
        while True:
            if self.free == 0 and nbytes > start:
                self.cut()
            size = min(self.free, nbytes - start)
            self.runs[-1].append((tensor, start, size, self.used))
            self.used += align(size)
            start += size
            if start == nbytes:
                return


def _cut(specs: Sequence[TensorSpec], capacity: int) -> tuple[Bucket, ...]:
    cutter = _Cutter(capacity)
    layers = [layer_of(spec.name) for spec in specs]
    for layer, group in itertools.groupby(range(len(specs)), key=layers.__getitem__):
        _place(cutter, specs, list(group), layer)
    homes: dict[str, set[int]] = {}
    for number, runs in enumerate(cutter.runs):
        for tensor, *_ in runs:
            homes.setdefault(layers[tensor], set()).add(number)
    return tuple(
        Bucket(
            number,
            tuple(
                Piece(*run, run[2] == specs[run[0]].nbytes, len(homes[layers[run[0]]]) == 1)
                for run in runs
            ),
            max(align(offset + size) for _, _, size, offset in runs),
        )
        for number, runs in enumerate(cutter.runs)
    )


def _place(cutter: _Cutter, specs: Sequence[TensorSpec], group: list[int], path: str) -> None:
    """Put the tensors below `path` into one bucket, or each of its modules into one.

    Engines fuse tensors of one module (`gate_proj` and `up_proj`), and keep those that come first.
    So a module that the open bucket does not hold begins a new one, even if that is too small too.
    """
    size = sum(align(specs[index].nbytes) for index in group)
    is_layer = path == layer_of(specs[group[0]].name)
    if cutter.used and cutter.free < size and not (is_layer and size > cutter.capacity):
        cutter.cut()
    if size <= cutter.capacity or len(group) == 1:
        for index in group:
            cutter.add(index, specs[index].nbytes)
        return
    depth = path.count(".") + 2
    paths = {index: ".".join(specs[index].name.split(".")[:depth]) for index in group}
    for inner, part in itertools.groupby(group, key=paths.__getitem__):
        _place(cutter, specs, list(part), inner)


def _hash(specs: Sequence[TensorSpec], capacity: int, buckets: Sequence[Bucket]) -> str:
    tensors = [[spec.name, dtype_name(spec.dtype), spec.shape] for spec in specs]
    places = [
        [bucket.nbytes, [[p.tensor, p.start, p.size, p.offset] for p in bucket.pieces]]
        for bucket in buckets
    ]
    text = json.dumps([FORMAT, ALIGNMENT, capacity, tensors, places], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
