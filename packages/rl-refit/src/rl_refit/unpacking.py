"""From buckets to tensors: copied to where they belong, or put together and handed out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rl_refit.digest import bytes_of
from rl_refit.pieces import PieceViews, copy_all, view_runs
from rl_refit.plan import Bucket, Piece, RefitPlan, TensorSpec
from rl_refit.transports.base import ReceivingSide

Notice = Callable[[TensorSpec, int, torch.Tensor], None]
"""Is told what came: the tensor's spec, where in it the run begins, in bytes, and the run."""


class Unpacker:
    """Takes buckets apart, with memory that is kept from one refit to the next.

    Args:
        plan: What lies where.
        side: The receiver's end of the transport.
        device: Where tensors are wanted.
        into: The engine's own tensors, by name: pieces are copied there as they come.
    """

    def __init__(
        self,
        plan: RefitPlan,
        side: ReceivingSide,
        *,
        device: torch.device,
        into: Mapping[str, torch.Tensor],
    ) -> None:
        self._plan = plan
        self._device = device
        self._into = into
        stay = bool(side.buffers) and all(b.device == device for b in side.buffers)
        self._views = PieceViews(plan, side.buffers) if stay else None
        self._parts = torch.empty(0, dtype=torch.uint8)
        self._rooms = [self._parts, self._parts]

    @property
    def room_bytes(self) -> int:
        """The memory that is kept for tensors that come in parts and have no place of their own."""
        return sum(len(room) for room in self._rooms)

    def unpack(
        self, bucket: Bucket, data: torch.Tensor, *, load_keeps: bool, notice: Notice | None
    ) -> list[tuple[str, torch.Tensor]]:
        """Copy what has a place of its own; return the other tensors that the bucket completes.

        With `load_keeps` those whose layer goes on in another bucket are copies.
        """
        if self._views is None:
            runs = view_runs(self._plan, bucket, data.to(self._device))
        else:
            runs = self._views.of(bucket)
        tensors: list[tuple[str, torch.Tensor]] = []
        for run in runs:
            own: list[torch.Tensor] = []
            came: list[torch.Tensor] = []
            for piece, view in zip(run.pieces, run.views, strict=True):
                spec = self._plan.specs[piece.tensor]
                if notice is not None:
                    notice(spec, piece.start, view)
                if (place := self._into.get(spec.name)) is not None:
                    own.append(place if piece.whole else _part_of(place, piece))
                    came.append(view)
                elif (tensor := self._complete(spec, piece, view, load_keeps)) is not None:
                    tensors.append((spec.name, tensor))
            if own:
                copy_all(own, came)
        return tensors

    def close(self) -> None:
        """Let go of all memory."""
        self._parts = torch.empty(0, dtype=torch.uint8)
        self._rooms = [self._parts, self._parts]
        if self._views is not None:
            self._views.close()

    def _complete(
        self, spec: TensorSpec, piece: Piece, view: torch.Tensor, load_keeps: bool
    ) -> torch.Tensor | None:
        """Return the tensor, or put a part to those before it and return None until the last."""
        if piece.whole:
            return view.clone() if load_keeps and not piece.in_place else view
        if piece.start == 0:
            self._parts = self._room(spec.nbytes, load_keeps)
        self._parts[piece.start : piece.start + piece.size] = view
        if piece.start + piece.size < spec.nbytes:
            return None
        return self._parts.view(spec.dtype).view(spec.shape)

    def _room(self, nbytes: int, load_keeps: bool) -> torch.Tensor:
        if load_keeps:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Two take turns: one may begin in the bucket in which another ends, before that is loaded.
        self._rooms.reverse()
        if len(self._rooms[0]) < nbytes:
            self._rooms[0] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._rooms[0][:nbytes]


def _part_of(own: torch.Tensor, piece: Piece) -> torch.Tensor:
    return bytes_of(own)[piece.start : piece.start + piece.size]
