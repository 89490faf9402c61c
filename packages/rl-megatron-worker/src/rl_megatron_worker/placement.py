"""Moving the model's parameters onto the device and off it, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rl_megatron_worker.runtime import Runtime

_CPU = torch.device("cpu")


def place_parameters(chunks: Sequence[nn.Module], runtime: Runtime, *, on_device: bool) -> None:
    """Have the parameters on the device, or on the CPU; those of buffers move with the buffers.

    With a distributed optimizer parameters are views of a data-parallel buffer, whose storage is
    given up and filled again, so that every view stays what it is.
    """
    if not runtime.on_cuda:
        return
    device = runtime.device if on_device else _CPU
    with runtime.scope():
        for chunk in chunks:
            buffers = list(_parameter_buffers(chunk))
            for buffer in buffers:
                if on_device:
                    buffer.reload_from_cpu(move_params=True, move_grads=False)
                else:
                    buffer.offload_to_cpu(move_params=True, move_grads=False)
            inside = {id(parameter) for buffer in buffers for parameter in buffer.params}
            others = (each for each in chunk.parameters() if id(each) not in inside)
            _move([*others, *nn.Module.buffers(chunk)], device)
        torch.cuda.synchronize()


def _parameter_buffers(chunk: nn.Module) -> Iterator[Any]:
    """Yield the buffers of data parallelism that hold parameters."""
    for name in ("buffers", "expert_parallel_buffers"):
        found: Any = getattr(chunk, name, None)
        # `nn.Module.buffers` is a method, which only data parallelism replaces by a list.
        if isinstance(found, list):
            yield from (buffer for buffer in found if buffer.param_data is not None)


def _move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
