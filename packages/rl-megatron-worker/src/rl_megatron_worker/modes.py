"""Train and eval mode for the length of a call, without a trace afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import nn

    from rl_megatron_worker.runtime import Runtime


@contextmanager
def training_mode(chunks: Sequence[nn.Module]) -> Generator[None, None, None]:
    """Run in train mode; afterwards the mode is what it was."""
    with _mode(chunks, training=True):
        yield


@contextmanager
def evaluating(chunks: Sequence[nn.Module], runtime: Runtime) -> Generator[None, None, None]:
    """Run in eval mode without gradients; mode and random state are afterwards what they were."""
    devices = [runtime.device] if runtime.on_cuda else []
    with _mode(chunks, training=False), torch.no_grad(), torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def _mode(chunks: Sequence[nn.Module], *, training: bool) -> Generator[None, None, None]:
    before = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.train(training)
    try:
        yield
    finally:
        for chunk, was_training in zip(chunks, before, strict=True):
            chunk.train(was_training)
