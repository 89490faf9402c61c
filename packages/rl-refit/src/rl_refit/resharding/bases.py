"""What a rank keeps of its last transfer, so that the next one sends what has changed alone.

A trainer keeps copies of its shards in the wire dtype. An engine needs none: the places of its
slices hold what has arrived. Both note which transfer their bits are of, by a number that its
members have drawn for it; where a sender and a receiver have the same one, a slice travels as the
patch of `rl_refit.delta`. Both outlast the process group, so that a member that is lost, or joins,
costs the others nothing.
"""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rl_refit.delta import PatchWriter, apply_patch, has_room, slices_of_words, views_of, words_of
from rl_refit.digest import bytes_of
from rl_refit.plan import TensorSpec
from rl_refit.resharding.layouts import Shard
from rl_refit.resharding.slices import Box

logger = logging.getLogger(__name__)


class Copy(NamedTuple):
    """A shard as it was sent last."""

    box: Box
    data: torch.Tensor
    """Its elements in the wire dtype, contiguous, on the CPU."""


class ShardCopies:
    """Copies of what a rank holds, of the tensors that engines want.

    Attributes:
        transfer: The transfer whose bits they are; None before the first, and while they change.
    """

    def __init__(self) -> None:
        self.transfer: int | None = None
        self._copies: dict[str, list[Copy]] = {}
        # What there was no memory for, so that it is said once.
        self._refused: dict[str, list[tuple[Box, torch.dtype]]] | None = None

    def find(self, spec: TensorSpec, box: Box) -> torch.Tensor | None:
        """Return a slice as it was sent last, a view; None if it was not, or in another dtype."""
        for copy in self._copies.get(spec.name, ()):
            if copy.data.dtype == spec.dtype and copy.box.contains(box):
                return box.relative_to(copy.box).view_of(copy.data)
        return None

    def update(self, held: Mapping[str, Sequence[Shard]], specs: Iterable[TensorSpec]) -> bool:
        """Take over the shards of these tensors; return whether a bit of them has changed.

        Where this machine has no memory for the copies, there are none: all has changed, and
        nothing is found.
        """
        wanted = [(spec, held[spec.name]) for spec in specs if spec.name in held]
        layout = {spec.name: [(each.box, spec.dtype) for each in shards] for spec, shards in wanted}
        has_changed = self.transfer is None or layout != self._layout()
        self.transfer = None
        if layout != self._layout() and not self._allocate(layout):
            return True
        for spec, shards in wanted:
            for shard, copy in zip(shards, self._copies[spec.name], strict=True):
                has_changed = has_changed or not _same_bits(copy.data, shard.data.to(spec.dtype))
                if has_changed:
                    copy.data.copy_(shard.data)
        return has_changed

    def close(self) -> None:
        """Release the memory."""
        self.transfer, self._copies = None, {}

    def _layout(self) -> dict[str, list[tuple[Box, torch.dtype]]]:
        return {
            name: [(copy.box, copy.data.dtype) for copy in copies]
            for name, copies in self._copies.items()
        }

    def _allocate(self, layout: dict[str, list[tuple[Box, torch.dtype]]]) -> bool:
        """Make room for all copies; return whether there is any."""
        self._copies = {}
        nbytes = sum(box.numel * kind.itemsize for each in layout.values() for box, kind in each)
        if not has_room(nbytes):
            if self._refused != layout:
                logger.warning(
                    "delta: this rank has no memory for a copy of the %d MiB of its shards, which "
                    "are sent in full",
                    nbytes >> 20,
                )
            self._refused = layout
            return False
        self._refused = None
        self._copies = {
            # Written at once, so that others who ask for available memory find this taken.
            name: [Copy(box, torch.zeros(box.shape, dtype=kind).contiguous()) for box, kind in each]
            for name, each in layout.items()
        }
        return True


@dataclass(slots=True)
class Bases:
    """What one rank keeps of its last transfer.

    Attributes:
        sent: Copies of its shards; None: it sends in full.
        received: The transfer whose bits its places hold; None for none, and while they change.
        places: These places.
    """

    sent: ShardCopies | None = None
    received: int | None = None
    places: Sequence[tuple[str, Box, torch.Tensor]] = ()

    def use(self, places: Sequence[tuple[str, Box, torch.Tensor]]) -> None:
        """Receive in these places from now on; others than before hold nothing yet."""
        is_same = len(places) == len(self.places) and all(
            one[:2] == other[:2] and _same_place(one[2], other[2])
            for one, other in zip(places, self.places, strict=True)
        )
        if not is_same:
            self.received = None
        self.places = places

    def numbers(self) -> tuple[int, int]:
        """Return the transfers that were sent and received last, -1 for none."""
        found = (None if self.sent is None else self.sent.transfer, self.received)
        sent, received = (-1 if each is None else each for each in found)
        return sent, received

    def mark(self, transfer: int) -> None:
        """Note that a transfer was sent and received."""
        self.received = transfer
        if self.sent is not None:
            self.sent.transfer = transfer

    def close(self) -> None:
        """Release the memory."""
        self.received, self.places = None, ()
        if self.sent is not None:
            self.sent.close()


@dataclass(frozen=True, slots=True)
class SlicePatch:
    """What has changed in a slice.

    Attributes:
        writer: Has all of its words.
        num_words: How many 16-bit words the slice has.
    """

    writer: PatchWriter
    num_words: int

    @classmethod
    def between(cls, old: torch.Tensor, new: torch.Tensor) -> SlicePatch:
        """Compare two versions of a slice, of one shape and dtype; `new` stays as it is."""
        words = words_of(new)
        writer = PatchWriter(words_of(old), slices_of_words(len(words)), updates=False)
        for _ in writer.add(words):
            pass
        return cls(writer, len(words))


def patched(place: torch.Tensor, patch: torch.Tensor) -> torch.Tensor:
    """Return a slice after a patch; `place`, which has it before, may change.

    Args:
        place: Of any shape, dtype and strides.
        patch: `[bytes]`, uint8, on the CPU.

    Raises:
        ValueError: It is no patch of this slice.
    """
    words = words_of(place)
    apply_patch(views_of(words, slices_of_words(len(words))), patch)
    # Of an odd number of bytes, without the one that fills the last word up.
    data = torch.from_numpy(words.view(np.uint8))[: place.numel() * place.dtype.itemsize]
    return data.view(place.dtype).view(place.shape)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Not the values, of which 0 equals -0 and no NaN equals itself.
    return torch.equal(bytes_of(one), bytes_of(other.cpu()))


def _same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Both are alive, so that an address is of one storage.
    return one.data_ptr() == other.data_ptr() and (one.dtype, one.shape, one.stride()) == (
        other.dtype,
        other.shape,
        other.stride(),
    )
