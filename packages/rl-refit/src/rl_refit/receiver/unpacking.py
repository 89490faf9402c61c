"""From buckets back to tensors: copied to where they belong, or assembled for `load`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rl_refit.buffers import PieceViews, copy_all, view_runs
from rl_refit.digest import bytes_of
from rl_refit.plan import Bucket, Piece, RefitPlan, TensorSpec
from rl_refit.transports.base import ReceivingSide

Observer = Callable[[TensorSpec, int, torch.Tensor], None]
"""Is called with each piece: its tensor's spec, its first byte in there, and the piece."""


class Unpacker:
    """Unpacks buckets, with memory that is kept from one refit to the next.

    Args:
        plan: What lies where.
        side: The receiver's end of the transport.
        device: Where tensors are wanted.
        into: The engine's own tensors by name: pieces are copied there as they arrive.
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
        # Views can be kept only if buckets always arrive in the same memory, on the right device.
        is_stable = bool(side.buffers) and all(b.device == device for b in side.buffers)
        self._views = PieceViews(plan, side.buffers) if is_stable else None
        self._partial = torch.empty(0, dtype=torch.uint8)
        self._scratch = [self._partial, self._partial]

    @property
    def scratch_bytes(self) -> int:
        """The memory that is kept for assembling tensors that arrive in parts."""
        return sum(len(memory) for memory in self._scratch)

    def unpack(
        self, bucket: Bucket, data: torch.Tensor, *, load_keeps: bool, observe: Observer | None
    ) -> list[tuple[str, torch.Tensor]]:
        """Copy the tensors of `into`; return the others that this bucket completes.

        Args:
            bucket: The next one in order.
            data: Its bytes, `[nbytes]`, uint8.
            load_keeps: Copy those whose layer continues in another bucket.
            observe: Called with each piece, before it is copied.
        """
        if self._views is None:
            runs = view_runs(self._plan, bucket, data.to(self._device))
        else:
            runs = self._views.of(bucket)
        tensors: list[tuple[str, torch.Tensor]] = []
        for run in runs:
            targets: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            for piece, view in zip(run.pieces, run.views, strict=True):
                spec = self._plan.specs[piece.tensor]
                if observe is not None:
                    observe(spec, piece.start, view)
                if (own := self._into.get(spec.name)) is not None:
                    targets.append(own if piece.is_full else _bytes_of_piece(own, piece))
                    sources.append(view)
                elif (tensor := self._complete(spec, piece, view, load_keeps)) is not None:
                    tensors.append((spec.name, tensor))
            if targets:
                copy_all(targets, sources)
        return tensors

    def close(self) -> None:
        """Release all memory."""
        self._partial = torch.empty(0, dtype=torch.uint8)
        self._scratch = [self._partial, self._partial]
        if self._views is not None:
            self._views.close()

    def _complete(
        self, spec: TensorSpec, piece: Piece, view: torch.Tensor, load_keeps: bool
    ) -> torch.Tensor | None:
        """Return the full tensor; or None until the last of its parts, which are assembled."""
        if piece.is_full:
            return view.clone() if load_keeps and not piece.has_layer else view
        if piece.start == 0:
            self._partial = self._room(spec.nbytes, load_keeps)
        self._partial[piece.start : piece.start + piece.size] = view
        if piece.start + piece.size < spec.nbytes:
            return None
        return self._partial.view(spec.dtype).view(spec.shape)

    def _room(self, nbytes: int, load_keeps: bool) -> torch.Tensor:
        if load_keeps:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Two take turns: a tensor may begin in the bucket that completes another one, and both are
        # needed until that bucket is loaded.
        self._scratch.reverse()
        if len(self._scratch[0]) < nbytes:
            self._scratch[0] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._scratch[0][:nbytes]


def _bytes_of_piece(own: torch.Tensor, piece: Piece) -> torch.Tensor:
    return bytes_of(own)[piece.start : piece.start + piece.size]
