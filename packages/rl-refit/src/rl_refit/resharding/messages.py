"""What ranks send each other in a round: packed slices, or patches of slices.

Everything that a rank sends another one in a round is one message, a `Flow`, without gaps. Where
slices may be patches (`bases`), the receiver learns the sizes first.
"""

# torch annotates some of its functions only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from rl_refit.digest import bytes_of
from rl_refit.errors import VerificationError
from rl_refit.plan import TensorSpec
from rl_refit.report import Traffic
from rl_refit.resharding.bases import Bases, SlicePatch, patched
from rl_refit.resharding.digest import add_digests, shard_digest
from rl_refit.resharding.layouts import Shard
from rl_refit.resharding.planner import ReshardPlan
from rl_refit.resharding.slices import Box


class Want(NamedTuple):
    """A slice that this rank consumes, and where it goes."""

    name: str
    """Of the trainer's tensor."""
    shape: tuple[int, ...]
    """Of the full tensor."""
    box: Box
    data: torch.Tensor
    """The place, of the box's shape: a view into the engine's parameter, whose dtype is sent.

    If the sender sends what has changed, it keeps what has arrived until the next refit."""


@dataclass(slots=True)
class Flow:
    """The slices that go from one rank to another in a round, in one message."""

    peer: int
    is_out: bool
    indices: list[int]
    sizes: list[int]
    """Of each slice in the message, in bytes."""
    is_delta: bool
    """Whether slices may be patches, so that both sides have to know the sizes first."""
    data: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


@dataclass(frozen=True, slots=True)
class SharedBases:
    """The last transfer that a rank has sent, and received; and those of its peers, by rank."""

    own: tuple[int, int] = (-1, -1)
    theirs: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def allows_delta(self, peer: int, *, is_out: bool) -> bool:
        """Return whether what has changed is enough, to or from a peer."""
        if peer not in self.theirs:
            return False
        sender, receiver = (self.own, self.theirs[peer])[:: 1 if is_out else -1]
        return sender[0] == receiver[1] != -1


class SliceMessages:
    """Makes and reads one rank's messages, over the transfers of a plan.

    Args:
        plan: Of the slices.
        rank: This one.
        device: Of the messages.
        wants: The places of what this rank consumes, by name.
        bases: What this rank keeps of its last transfer.

    Attributes:
        held: What this rank sends, by name.
        digests: Of what was sent in this transfer, by receiver and index of the tensor.
        traffic: Counts the words of patches in this transfer.
        problem: Why a patch of this transfer could not be applied, or "".
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        *,
        device: torch.device,
        held: Mapping[str, Sequence[Shard]],
        wants: Mapping[str, Sequence[Want]],
        bases: Bases,
    ) -> None:
        self._plan, self._rank, self._device = plan, rank, device
        self._wants, self._bases = wants, bases
        self.held = held
        self.begin(SharedBases())

    def begin(self, shared: SharedBases) -> None:
        """Begin a transfer, given what its ranks have of the one before."""
        self._shared = shared
        self.digests: dict[tuple[int, int], int] = {}
        self.traffic = Traffic()
        self.problem = ""

    def flows(self, members: Sequence[int]) -> list[Flow]:
        """Return what goes to and from each peer, of some pieces of the plan."""
        pieces = self._plan.pieces
        found: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for index in members:
            # A rank that is both has one flow each way with itself, which no message carries.
            sender, receiver = int(pieces.sender[index]), int(pieces.receiver[index])
            if sender == self._rank:
                found[receiver, True].append(index)
            if receiver == self._rank:
                found[sender, False].append(index)
        return [
            Flow(
                peer,
                is_out,
                indices,
                sizes=pieces.nbytes[indices].tolist(),
                is_delta=self._shared.allows_delta(peer, is_out=is_out),
            )
            for (peer, is_out), indices in found.items()
        ]

    def room(self, flow: Flow) -> torch.Tensor:
        """Return memory for a message of these sizes."""
        return torch.empty(self._offsets(flow)[-1], dtype=torch.uint8, device=self._device)

    def pack(self, flow: Flow) -> None:
        """Make a message of slices in the wire dtype, or of patches of them."""
        if flow.is_delta:
            self._pack_changes(flow)
            return
        flow.data = self.room(flow)
        for index, room in zip(flow.indices, self._rooms(flow), strict=True):
            piece = self._full(index, room)
            # The copy casts, so that a narrower wire dtype means fewer bytes.
            piece.copy_(self._slice(index))
            self._add_digest(index, piece)

    def _pack_changes(self, flow: Flow) -> None:
        assert self._bases.sent is not None
        contents: list[torch.Tensor | SlicePatch] = []
        for position, index in enumerate(flow.indices):
            spec, box = self._spec(index), self._plan.box(index)
            new = self._slice(index).to(spec.dtype).contiguous()
            self._add_digest(index, new)
            old = self._bases.sent.find(spec, box)
            content = new if old is None else SlicePatch.between(old, new)
            if isinstance(content, SlicePatch):
                self.traffic.num_words += content.num_words
                self.traffic.num_changed += content.writer.num_changed
                if content.writer.nbytes < flow.sizes[position]:
                    flow.sizes[position] = content.writer.nbytes
                else:
                    content = new
            contents.append(content)
        flow.data = self.room(flow)
        for content, room in zip(contents, self._rooms(flow), strict=True):
            if isinstance(content, SlicePatch):
                content.writer.write(room)
            else:
                room.copy_(bytes_of(content))

    def _slice(self, index: int) -> torch.Tensor:
        """Return the elements of a piece that this rank sends, as it holds them."""
        spec, box = self._spec(index), self._plan.box(index)
        # A piece is of one box that is held.
        shard = next(each for each in self.held[spec.name] if each.box.contains(box))
        return box.relative_to(shard.box).view_of(shard.data)

    def _add_digest(self, index: int, data: torch.Tensor) -> None:
        key = int(self._plan.pieces.receiver[index]), int(self._plan.pieces.tensor[index])
        digest = shard_digest(data, self._spec(index).name, self._plan.box(index))
        self.digests[key] = add_digests([self.digests.get(key, 0), digest])

    def resize(self, flow: Flow, sizes: Sequence[int]) -> None:
        """Expect slices of these sizes, in bytes, as their sender announces.

        Raises:
            VerificationError: One is larger than the slice, or empty.
        """
        for index, size, most in zip(flow.indices, sizes, flow.sizes, strict=True):
            if not 0 < size <= most:
                raise VerificationError(
                    f"rank {flow.peer} announces {size} bytes for {self._spec(index).name} "
                    f"{self._plan.box(index)}, which has {most}"
                )
        flow.sizes = list(sizes)

    def unpack(self, flow: Flow) -> None:
        """Copy what has arrived to its places."""
        for each, (index, room) in enumerate(zip(flow.indices, self._rooms(flow), strict=True)):
            try:
                patch = self._is_patch(flow, each)
                piece = self._patched(index, room) if patch else self._full(index, room)
            except ValueError as error:
                # All ranks are told, once the other slices have arrived.
                where = f"{self._spec(index).name} {self._plan.box(index)}"
                self.problem = f"{where} from rank {flow.peer}: {error}"
            else:
                self._place(index, piece)

    def _patched(self, index: int, patch: torch.Tensor) -> torch.Tensor:
        """Return a piece that was received before, after a patch."""
        box = self._plan.box(index)
        # A piece is of one box that is wanted.
        wants = self._wants[self._spec(index).name]
        want = next(each for each in wants if each.box.contains(box))
        return patched(box.relative_to(want.box).view_of(want.data), patch)

    def _full(self, index: int, room: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a full piece as a view of its shape and dtype."""
        return room.view(self._spec(index).dtype).view(self._plan.box(index).shape)

    def _place(self, index: int, piece: torch.Tensor) -> None:
        """Copy a piece to the places where it is wanted."""
        name, box = self._spec(index).name, self._plan.box(index)
        for want in self._wants.get(name, ()):
            # Of several places for the same box, or of overlapping boxes, each gets it.
            if common := want.box.intersect(box):
                place = common.relative_to(want.box).view_of(want.data)
                place.copy_(common.relative_to(box).view_of(piece))

    def _rooms(self, flow: Flow) -> list[torch.Tensor]:
        """Return each piece's bytes of a message."""
        starts = self._offsets(flow)
        return [
            flow.data[start : start + size]
            for start, size in zip(starts[:-1], flow.sizes, strict=True)
        ]

    def _offsets(self, flow: Flow) -> list[int]:
        """Return where each piece begins in a message, and at last the size of the message.

        Full slices are in the order of falling item sizes, so that every view is aligned, and
        before the patches, which begin anywhere.
        """

        def rank(each: int) -> tuple[bool, int]:
            return self._is_patch(flow, each), -self._spec(flow.indices[each]).dtype.itemsize

        starts, end = [0] * len(flow.indices), 0
        for each in sorted(range(len(flow.indices)), key=rank):
            starts[each] = end
            end += flow.sizes[each]
        return [*starts, end]

    def _is_patch(self, flow: Flow, each: int) -> bool:
        """Return whether a piece of a message is a patch, which is smaller than the slice."""
        return flow.sizes[each] < int(self._plan.pieces.nbytes[flow.indices[each]])

    def _spec(self, piece: int) -> TensorSpec:
        return self._plan.specs[int(self._plan.pieces.tensor[piece])]
