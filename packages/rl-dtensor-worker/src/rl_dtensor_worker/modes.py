"""Train and eval mode for the length of a call, without a trace afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rl_dtensor_worker.parallel.fsdp import abandon_pass, reshard_model

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn


@contextmanager
def training_mode(model: nn.Module) -> Generator[None, None, None]:
    """Run in train mode; afterwards the mode is what it was, and the parameters are sharded.

    What raises leaves no gradients.
    """
    before = model.training
    model.train()
    try:
        yield
    except BaseException:
        abandon_pass(model)
        raise
    finally:
        reshard_model(model)
        model.train(before)


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Generator[None, None, None]:
    """Run in eval mode without gradients; mode and random state are afterwards what they were."""
    before = model.training
    model.eval()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    except BaseException:
        abandon_pass(model)
        raise
    finally:
        reshard_model(model)
        model.train(before)
