"""The pieces of buckets, as views of the memory that buckets lie in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_refit.plan import Bucket, Piece, RefitPlan

RUN_BYTES = 1 << 20
"""What is copied by one call: enough to be worth it, and still in the cache when it is digested."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in a bucket that are copied at once: whole tensors, or one part of a tensor.

    Attributes:
        pieces: What they are, in order; only one where it is larger than a run.
        views: One of each: that of a whole tensor has its dtype and shape, that of a part is bytes.
        end: Where the last one ends in the bucket.
    """

    pieces: tuple[Piece, ...]
    views: list[torch.Tensor]
    end: int


class PieceViews:
    """The pieces of every bucket in the buffer that it goes through.

    They are made once: thousands of views take longer to make than their bytes to copy.
    """

    def __init__(self, plan: RefitPlan, buffers: Sequence[torch.Tensor]) -> None:
        self._plan = plan
        self._buffers = buffers
        self._made: dict[int, list[Run]] = {}

    def of(self, bucket: Bucket) -> list[Run]:
        """Return what `view_runs` does."""
        made = self._made.get(bucket.index)
        if made is None:
            buffer = self._buffers[bucket.index % len(self._buffers)]
            made = self._made[bucket.index] = view_runs(self._plan, bucket, buffer)
        return made

    def close(self) -> None:
        """Let go of the memory."""
        self._made.clear()
        self._buffers = ()


def view_runs(plan: RefitPlan, bucket: Bucket, data: torch.Tensor) -> list[Run]:
    """Return the runs of a bucket, with views of its bytes in `data` (`[bytes]`, uint8)."""
    return [
        Run(
            pieces,
            [_view(plan, piece, data) for piece in pieces],
            pieces[-1].offset + pieces[-1].size,
        )
        for pieces in cut_runs(bucket.pieces)
    ]


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target: a call for each takes as long as to copy a small tensor."""
    # torch's own optimizers and FSDP use it; it has no public name.
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def cut_runs(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """Return the pieces, in order, as runs of at most `RUN_BYTES`, or of one piece."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        run = runs[-1] if runs else []
        fits = run and piece.offset + piece.size - run[0].offset <= RUN_BYTES
        if fits and piece.whole and run[-1].whole:
            run.append(piece)
        else:
            runs.append([piece])
    return [tuple(run) for run in runs]


def _view(plan: RefitPlan, piece: Piece, data: torch.Tensor) -> torch.Tensor:
    view = data[piece.offset : piece.offset + piece.size]
    if not piece.whole:
        return view
    spec = plan.specs[piece.tensor]
    return view.view(spec.dtype).view(spec.shape)
