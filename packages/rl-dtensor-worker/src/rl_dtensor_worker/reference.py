"""The frozen reference copy of the policy, kept on the CPU and swapped in when it is asked."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rl_dtensor_worker.model.build import persistent_state
from rl_dtensor_worker.parallel.fsdp import get_cpu_state_dict, local_tensor, reshard_model

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn


class ReferenceModel:
    """This rank's shards of the model as it was when this was constructed.

    They, and the policy's while they are swapped in, have memory of their own that is filled anew
    with every swap. The model's own tensors stay where they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._pin_memory = any(local_tensor(p).is_cuda for p in model.parameters())
        self._reference = self._copy(model)
        self._policy: dict[str, torch.Tensor] | None = None

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Generator[None, None, None]:
        """Give `model` the reference weights; on exit it has its own again, bit for bit."""
        # What a forward has left unsharded would otherwise outlast the swap.
        reshard_model(model)
        if self._policy is None:
            self._policy = self._copy(model)
        else:
            _copy_local(self._policy, dict(_locals(model)))
        live = dict(_locals(model))
        _copy_local(live, self._reference)
        try:
            yield
        finally:
            reshard_model(model)
            _copy_local(live, self._policy)

    def _copy(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return get_cpu_state_dict(persistent_state(model).items(), pin_memory=self._pin_memory)


def _locals(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, local_tensor(tensor)) for name, tensor in persistent_state(model).items()]


@torch.no_grad()
def _copy_local(targets: dict[str, torch.Tensor], sources: dict[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name], non_blocking=True)
    if any(tensor.is_cuda for tensor in (*targets.values(), *sources.values())):
        torch.cuda.synchronize()
