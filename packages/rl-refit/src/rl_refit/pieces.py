"""The pieces of buckets, as views of the memory that buckets lie in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_refit.plan import Bucket, RefitPlan


class PieceViews:
    """The pieces of every bucket in the buffer that it goes through.

    They are made once: thousands of views take longer to make than their bytes to copy.
    """

    def __init__(self, plan: RefitPlan, buffers: Sequence[torch.Tensor]) -> None:
        self._plan = plan
        self._buffers = buffers
        self._made: dict[int, list[torch.Tensor]] = {}

    def of(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return what `view_pieces` does."""
        made = self._made.get(bucket.index)
        if made is None:
            buffer = self._buffers[bucket.index % len(self._buffers)]
            made = self._made[bucket.index] = view_pieces(self._plan, bucket, buffer)
        return made

    def close(self) -> None:
        """Let go of the memory."""
        self._made.clear()
        self._buffers = ()


def view_pieces(plan: RefitPlan, bucket: Bucket, data: torch.Tensor) -> list[torch.Tensor]:
    """Return a view of each piece of a bucket in `data` (`[bytes]`, uint8).

    That of a whole tensor has its dtype and shape, that of a part is bytes.
    """
    views: list[torch.Tensor] = []
    for piece in bucket.pieces:
        view = data[piece.offset : piece.offset + piece.size]
        if piece.whole:
            spec = plan.specs[piece.tensor]
            view = view.view(spec.dtype).view(spec.shape)
        views.append(view)
    return views
