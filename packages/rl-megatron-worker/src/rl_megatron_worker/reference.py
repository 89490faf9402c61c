"""The frozen reference copy of the policy, kept on the CPU and swapped in when it is asked."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import nn

Tensors = list[torch.Tensor]


class ReferenceModel:
    """This rank's part of the model as it was when this was constructed.

    It, and the policy's part while it is swapped in, have memory of their own that is filled anew
    with every swap. The model's own tensors stay where they are, in data parallelism's buffers.

    Args:
        chunks: The model on this rank.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._reference = _copies(_live(chunks))
        self._policy: Tensors | None = None

    @contextmanager
    def swapped_in(self, chunks: Sequence[nn.Module]) -> Generator[None, None, None]:
        """Give the model the reference weights; on exit it has its own again, bit for bit."""
        live = _live(chunks)
        if self._policy is None:
            self._policy = _copies(live)
        else:
            _copy(self._policy, live)
        _copy(live, self._reference)
        try:
            yield
        finally:
            _copy(live, self._policy)


def _live(chunks: Sequence[nn.Module]) -> Tensors:
    """Return every parameter, and every buffer that a checkpoint holds."""
    tensors: Tensors = []
    for chunk in chunks:
        tensors += chunk.parameters()
        persistent = chunk.state_dict(keep_vars=True)
        tensors += [buffer for name, buffer in chunk.named_buffers() if name in persistent]
    return tensors


def _copies(tensors: Tensors) -> Tensors:
    pinned = any(tensor.is_cuda for tensor in tensors)
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for tensor in tensors
    ]
    _copy(copies, tensors)
    return copies


@torch.no_grad()
def _copy(targets: Tensors, sources: Tensors) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
    if any(tensor.is_cuda for tensor in (*targets, *sources)):
        torch.cuda.synchronize()
