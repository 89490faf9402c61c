"""What has changed between two versions of a bucket, bit by bit: found, packed and applied.

Both sides of a refit by deltas hold a `Base`: the bytes of all buckets of the last version that
every receiver has loaded. The sender compares the new tensors with its own, and sends a *patch* of
each bucket; a receiver applies it to its own, whose digest must then be that of the full bucket. An
engine that receives into its own tensors has no other base than these: `OwnTensors`.

A bucket is compared in 16-bit words, so that a word is an element of bfloat16 and float16. Each
piece of a tensor is cut into *slices* of at most 65,536 words, which 16 bits can index. A patch is,
without gaps and in the machine's byte order:

    counts       [slices]  uint32  changed words of each slice; `FULL` for all of its words
    positions    [changed] uint16  of the changed words in their slices, slice after slice
    values       [changed] uint16  their new bits
    full slices  [words]   uint16  all words of the slices that are `FULL`

A slice of which half or more has changed is sent in full, as that is no larger. All lengths follow
from the counts and the plan.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from rl_refit.digest import DIGESTS, bytes_of
from rl_refit.host_memory import available_bytes
from rl_refit.plan import Bucket, RefitPlan

Words = npt.NDArray[np.uint16]

SLICE_WORDS = 1 << 16
"""Most words of a slice: what 16 bits can index, and small enough to stay in the cache."""
FULL = 0xFFFFFFFF
SEARCH_WORDS = 8 * SLICE_WORDS
"""Most words that are compared in one call: two versions of 1 MiB, which a core's caches hold."""

_memory = threading.local()

_SPARE = 1.1
"""Share of a copy's bytes that must be available for it."""


def has_room(nbytes: int) -> bool:
    """Return whether this machine has memory for copies of so many bytes."""
    return available_bytes() >= int(_SPARE * nbytes)


def base_bytes(plan: RefitPlan) -> int:
    """Return the bytes of a `Base`."""
    return sum(bucket.nbytes for bucket in plan.buckets)


class Base:
    """The bytes of all buckets of one version, in host memory.

    Args:
        plan: The buckets.

    Attributes:
        buckets: `[nbytes]` each, uint8; the gaps between pieces are zero.
        version: Whose bytes they are; None before the first, and while they change.
    """

    def __init__(self, plan: RefitPlan) -> None:
        # Written at once, so that others who ask for available memory find this taken.
        memory = torch.empty(base_bytes(plan), dtype=torch.uint8).zero_()
        ends = itertools.accumulate(bucket.nbytes for bucket in plan.buckets)
        self.buckets: Sequence[torch.Tensor] = [
            memory[end - bucket.nbytes : end]
            for bucket, end in zip(plan.buckets, ends, strict=True)
        ]
        self.version: int | None = None
        self._plan = plan
        self._slices: dict[int, tuple[tuple[int, int], ...]] = {}

    @classmethod
    def if_room(cls, plan: RefitPlan, *, copies: int) -> Base | None:
        """Return a base if this machine has memory for so many of them, else None."""
        return cls(plan) if has_room(base_bytes(plan) * copies) else None

    def slices(self, bucket: Bucket) -> tuple[tuple[int, int], ...]:
        """Return the slices of a bucket, see `slices_of`."""
        if bucket.index not in self._slices:
            self._slices[bucket.index] = slices_of(bucket)
        return self._slices[bucket.index]

    def words(self, bucket: Bucket) -> Words:
        """Return a bucket as words, `[nbytes / 2]`: a view."""
        return self.buckets[bucket.index].numpy().view(np.uint16)

    def places(self, bucket: Bucket) -> list[Words]:
        """Return the words of each slice of a bucket: views."""
        return views_of(self.words(bucket), self.slices(bucket))

    def digest(self, bucket: Bucket, kind: str) -> int:
        """Return the digest of a bucket, of a kind of `DIGESTS`."""
        return DIGESTS[kind](self.buckets[bucket.index], position=bucket.index)

    def update(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Replace a bucket by its full bytes (`[nbytes]`, uint8)."""
        self.buckets[bucket.index].copy_(data)

    def close(self) -> None:
        """Release the memory."""
        self.buckets = ()
        self.version = None


class OwnTensors:
    """A base that is an engine's own tensors: patches are applied where it reads its weights.

    So there is no copy of them, and no load. That something else has changed one is found by the
    digest.

    Args:
        plan: The buckets.
        tensors: The engine's, contiguous, by name; see `fit`.

    Attributes:
        version: Whose bytes they are; None before the first, and while they change.
    """

    def __init__(self, plan: RefitPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        self.version: int | None = None
        self._plan = plan
        self._data = [bytes_of(tensors[spec.name]) for spec in plan.specs]

    @staticmethod
    def fit(plan: RefitPlan, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether all tensors of a plan are there, in host memory and of full words."""
        return all(
            (own := tensors.get(spec.name)) is not None
            and own.device.type == "cpu"
            and own.nbytes % 2 == 0
            for spec in plan.specs
        )

    def places(self, bucket: Bucket) -> list[Words]:
        """Return the words of each slice of a bucket: views of the tensors."""
        pieces = [data.view(np.uint16) for data in self._pieces(bucket)]
        return [place for words in pieces for place in views_of(words, slices_of_words(len(words)))]

    def digest(self, bucket: Bucket, kind: str) -> int:
        """Return the digest of a bucket with these tensors in it, of the kind "xxh3"."""
        assert kind == "xxh3"
        running = xxhash.xxh3_64(seed=bucket.index)
        end = 0
        for piece, data in zip(bucket.pieces, self._pieces(bucket), strict=True):
            running.update(bytes(piece.offset - end))
            running.update(data.data)
            end = piece.offset + piece.size
        running.update(bytes(bucket.nbytes - end))
        return running.intdigest()

    def close(self) -> None:
        """Let go of the tensors."""
        self._data = []
        self.version = None

    def _pieces(self, bucket: Bucket) -> list[npt.NDArray[np.uint8]]:
        return [
            self._data[piece.tensor][piece.start : piece.start + piece.size].numpy()
            for piece in bucket.pieces
        ]


def slices_of(bucket: Bucket) -> tuple[tuple[int, int], ...]:
    """Return the slices of a bucket as first word and number of words, in order.

    A piece of an odd number of bytes ends with half a word; the other half is a zero of the gap.
    """
    return tuple(
        (piece.offset // 2 + start, size)
        for piece in bucket.pieces
        for start, size in slices_of_words(-(-piece.size // 2))
    )


def slices_of_words(num_words: int) -> tuple[tuple[int, int], ...]:
    """Return the slices of so many words as first word and number of words, in order."""
    return tuple(
        (start, min(SLICE_WORDS, num_words - start)) for start in range(0, num_words, SLICE_WORDS)
    )


def views_of(words: Words, slices: Sequence[tuple[int, int]]) -> list[Words]:
    """Return the words of each slice: views."""
    return [words[start : start + size] for start, size in slices]


def words_of(tensor: torch.Tensor) -> Words:
    """Return a tensor's bytes in row-major order as words: a view of one that is contiguous.

    An odd number of bytes is filled up with a zero.
    """
    data = bytes_of(tensor.detach().cpu())
    if len(data) % 2:
        data = torch.cat([data, data.new_zeros(1)])
    # Not as a tensor: a slice of bytes may begin where torch allows no wider dtype.
    return data.numpy().view(np.uint16)


class _Changes(NamedTuple):
    """What differs in some slices, in their order: see the module for each part of a patch."""

    counts: list[int]
    positions: Words
    values: Words
    full: list[Words]
    num_changed: int
    end: int
    """Of the last slice in the bucket, in words."""


@dataclass(slots=True)
class PatchWriter:
    """Collects the changes of one bucket, and brings the base up to date.

    Attributes:
        base: `[words]` of the bucket.
        slices: See `slices_of`.
        updates: Whether the base takes the new words over. If not, those that are added must stay
            as they are until the patch is written.
        each: Calls a function with each of some arguments, and yields the results in order: `map`,
            or that of an executor with threads.
        num_changed: Words that have changed so far.
    """

    base: Words
    slices: Sequence[tuple[int, int]]
    updates: bool = True
    each: Callable[..., Iterator[Any]] = map
    num_changed: int = 0
    _counts: list[int] = field(default_factory=list[int])
    _positions: list[Words] = field(default_factory=list[Words])
    _values: list[Words] = field(default_factory=list[Words])
    _full: list[Words] = field(default_factory=list[Words])

    @property
    def nbytes(self) -> int:
        """Size of the patch, in bytes."""
        listed = itertools.chain(self._positions, self._values, self._full)
        return 4 * len(self._counts) + sum(words.nbytes for words in listed)

    def add(self, piece: Words) -> Iterator[int]:
        """Compare the new words of the next piece with the base.

        Yields:
            After every few slices, the end of the last one in the bucket, in bytes.
        """
        first = self.slices[len(self._counts)][0] if len(piece) else 0
        parts = [
            (first + begin, piece[begin : begin + SEARCH_WORDS])
            for begin in range(0, len(piece), SEARCH_WORDS)
        ]
        for found in self._compare_all(parts):
            self._counts += found.counts
            self._positions.append(found.positions)
            self._values.append(found.values)
            self._full += found.full
            self.num_changed += found.num_changed
            yield 2 * found.end

    def write(self, buffer: torch.Tensor) -> int:
        """Write the patch into a buffer (`[bytes]`, uint8) that has room; return its size."""
        assert len(self._counts) == len(self.slices)
        target = buffer.numpy()
        head = 4 * len(self._counts)
        target[:head] = np.array(self._counts, dtype=np.uint32).view(np.uint8)
        words = target[head : self.nbytes].view(np.uint16)
        parts = [*self._positions, *self._values, *self._full]
        if parts:
            np.concatenate(parts, out=words)
        return self.nbytes

    def _compare_all(self, parts: Sequence[tuple[int, Words]]) -> Iterator[_Changes]:
        # A call in a thread takes longer than the comparison of a small tensor.
        if len(parts) > 1:
            return self.each(self._compare, *zip(*parts, strict=True))
        return (self._compare(start, words) for start, words in parts)

    def _compare(self, start: int, new: Words) -> _Changes:
        """Compare consecutive slices with those of the base that begin at the word `start`."""
        end = start + len(new)
        old = self.base[start:end]
        where = np.flatnonzero(np.not_equal(old, new, out=_scratch(len(new))))
        bounds = [*range(0, len(new), SLICE_WORDS), len(new)]
        counts = np.diff(np.searchsorted(where, bounds))
        is_full = 2 * counts >= np.diff(bounds)
        listed = where[~np.repeat(is_full, counts)] if is_full.any() else where
        values = new[listed]
        if self.updates and len(listed) == len(where):
            old[where] = values
        elif self.updates:
            old[:] = new
        # Views, whose bits stay until the patch is written.
        words = old if self.updates else new
        full = [words[bounds[index] : bounds[index + 1]] for index in np.flatnonzero(is_full)]
        return _Changes(
            counts=np.where(is_full, FULL, counts).tolist(),
            # Of 16 bits, they begin anew with each slice.
            positions=listed.astype(np.uint16),
            values=values,
            full=full,
            num_changed=len(where),
            end=end,
        )


@contextmanager
def search_threads() -> Generator[Callable[..., Iterator[Any]]]:
    """Yield a `map` in as many threads as torch computes with, for `PatchWriter.each`.

    They start when it is first called.
    """
    if (num_threads := torch.get_num_threads()) == 1:
        yield map
        return
    with ThreadPoolExecutor(num_threads, "rl-refit-search") as threads:
        yield threads.map


def _scratch(num_words: int) -> npt.NDArray[np.bool_]:
    """Return memory for a comparison, used again by each of a thread, so that it stays cached."""
    if (memory := getattr(_memory, "differs", None)) is None:
        memory = _memory.differs = np.empty(SEARCH_WORDS, np.bool_)
    return memory[:num_words]


def apply_patch(places: Sequence[Words], patch: torch.Tensor) -> int:
    """Apply a patch to a bucket; return the number of words that it sets.

    Args:
        places: The words of each slice, in order.
        patch: `[bytes]`, uint8.

    Raises:
        ValueError: Its lengths or positions are not those of a patch of this bucket. The words may
            have been changed.
    """
    data = patch.numpy()
    head = 4 * len(places)
    if len(data) < head:
        raise ValueError(f"a patch of {len(data)} bytes for {len(places)} slices")
    counts = data[:head].view(np.uint32)
    sizes = np.array([len(words) for words in places], dtype=np.int64)
    is_full = counts == FULL
    total, num_full = int(counts[~is_full].sum(dtype=np.int64)), int(sizes[is_full].sum())
    due = head + 4 * total + 2 * num_full
    # Before anything is allocated whose size the counts tell.
    if len(data) != due:
        raise ValueError(f"a patch of {len(data)} bytes, of which {due} are accounted for")
    words = data[head:].view(np.uint16)
    positions, values, full = np.split(words, [total, 2 * total])
    _set_words(places, counts.tolist(), positions, values, full)
    return total + num_full


def _set_words(
    places: Sequence[Words],
    counts: Sequence[int],
    positions: Words,
    values: Words,
    full: Words,
) -> None:
    num_set = num_full = 0
    for words, count in zip(places, counts, strict=True):
        size = len(words)
        if count == FULL:
            words[:] = full[num_full : num_full + size]
            num_full += size
        elif count:
            end = num_set + count
            where = positions[num_set:end]
            # 16 bits cannot tell of a word beyond the end of a slice of the largest size.
            if size < SLICE_WORDS and where.max() >= size:
                raise ValueError("a patch sets words beyond the end of its slice")
            words[where] = values[num_set:end]
            num_set = end
