"""The buffers that buckets pass through, and the pieces of buckets as views of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rl_refit.plan import Bucket, Piece, RefitPlan

RUN_BYTES = 1 << 20
"""Most bytes of one copy: enough to amortise the call, few enough to be digested in the cache."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pieces that are copied in one call: full tensors, or one piece of a split one.

    Attributes:
        pieces: In order; a piece larger than `RUN_BYTES` forms a run of its own.
        views: One per piece: with dtype and shape of a full tensor, else `[size]`, uint8.
        end: End of the last piece in the bucket, in bytes.
    """

    pieces: tuple[Piece, ...]
    views: list[torch.Tensor]
    end: int


class PieceViews:
    """The pieces of every bucket, as views of the buffer that the bucket passes through.

    Args:
        plan: The offsets of all pieces.
        buffers: `[buffer_bytes]` each, uint8; bucket `k` passes through buffer `k % len(buffers)`.
    """

    def __init__(self, plan: RefitPlan, buffers: Sequence[torch.Tensor]) -> None:
        self._plan = plan
        self._buffers = buffers
        # Cached over refits: creating the view of a small tensor takes longer than copying it.
        self._runs: dict[int, list[Run]] = {}

    def of(self, bucket: Bucket) -> list[Run]:
        """Return the bucket's runs, see `view_runs`."""
        runs = self._runs.get(bucket.index)
        if runs is None:
            buffer = self._buffers[bucket.index % len(self._buffers)]
            runs = self._runs[bucket.index] = view_runs(self._plan, bucket, buffer)
        return runs

    def close(self) -> None:
        """Release the memory."""
        self._runs.clear()
        self._buffers = ()


def view_runs(plan: RefitPlan, bucket: Bucket, data: torch.Tensor) -> list[Run]:
    """Return the runs of a bucket as views of its bytes in `data` (`[bytes]`, uint8)."""
    return [
        Run(
            pieces,
            [_view(plan, piece, data) for piece in pieces],
            pieces[-1].offset + pieces[-1].size,
        )
        for pieces in group_runs(bucket.pieces)
    ]


def group_runs(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """Return the pieces, in order, as runs of at most `RUN_BYTES` or of one piece."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        run = runs[-1] if runs else []
        fits = run and piece.offset + piece.size - run[0].offset <= RUN_BYTES
        if fits and piece.is_full and run[-1].is_full:
            run.append(piece)
        else:
            runs.append([piece])
    return [tuple(run) for run in runs]


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, in one call."""
    # Faster than a loop of `copy_` for small tensors. torch's optimizers and FSDP use it, though it
    # has no public name.
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def zero_ranges(buffer: torch.Tensor, ranges: Iterable[tuple[int, int]]) -> None:
    """Set the `[start, end)` ranges of a buffer to zero."""
    # There may be thousands of gaps, and numpy's overhead for each is a fraction of torch's.
    data = buffer.numpy() if buffer.device.type == "cpu" else buffer
    for start, end in ranges:
        data[start:end] = 0


def _view(plan: RefitPlan, piece: Piece, data: torch.Tensor) -> torch.Tensor:
    view = data[piece.offset : piece.offset + piece.size]
    if not piece.is_full:
        return view
    spec = plan.specs[piece.tensor]
    return view.view(spec.dtype).view(spec.shape)
