"""The frozen reference: a copy of the policy on the CPU, swapped in while it is scored."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch

LocalTensors = Callable[[], Sequence[torch.Tensor]]


class ReferenceCopy:
    """This rank's shards of the model as they were when this was constructed.

    They, and the policy's while the reference is swapped in, have buffers of their own (pinned
    where the model is on a GPU) that every swap reuses. The model's tensors stay where they are, so
    that views of them, data-parallel buffers among them, remain valid.

    Args:
        local_tensors: Returns this rank's shards of every parameter and persistent buffer, in a
            fixed order, each time it is called.
    """

    def __init__(self, local_tensors: LocalTensors) -> None:
        self._local_tensors = local_tensors
        self._reference = _copies(local_tensors())
        self._policy: list[torch.Tensor] | None = None

    @contextmanager
    def swapped_in(self) -> Generator[None, None, None]:
        """Give the model the reference weights; on exit it has its own again, bit for bit."""
        live = self._local_tensors()
        if self._policy is None:
            self._policy = _copies(live)
        else:
            _copy(self._policy, live)
        _copy(live, self._reference)
        try:
            yield
        finally:
            _copy(self._local_tensors(), self._policy)


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pinned = any(tensor.is_cuda for tensor in tensors)
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for tensor in tensors
    ]
    _copy(copies, tensors)
    return copies


@torch.no_grad()
def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
    # Pinned copies are asynchronous: their sources must not change before they are done.
    if any(tensor.is_cuda for tensor in (*targets, *sources)):
        torch.cuda.synchronize()
