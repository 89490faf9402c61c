"""The device of this rank, the scope of Megatron-core calls, and moving parameters in place."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from megatron.core import tensor_parallel
from torch import nn

from rl_megatron_worker.compat.cpu_scope import cpu_scope
from rl_megatron_worker.compat.patches import engine_stand_ins

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from rl_interfaces.backend.host_memory import OffloadBuffers
    from rl_interfaces.backend.runtime import RankEnvironment


def may_have_gpus() -> bool:
    """Return whether ranks may run on GPUs, given the installed build of torch.

    The driver may run on a machine without GPUs and start ranks on others.
    """
    return torch.backends.cuda.is_built()


class Runtime:
    """The device of one rank; the rest of the package takes it from here.

    Args:
        environment: Rank and world size.
    """

    def __init__(self, environment: RankEnvironment) -> None:
        self.environment = environment
        self.device = environment.device

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @contextmanager
    def scope(self) -> Generator[None, None, None]:
        """Enter around every Megatron-core call, in the calling thread. Reentrant.

        On CUDA it selects the device; without CUDA it applies the CPU patches.

        Raises:
            RuntimeError: This version of megatron-core is not supported on the CPU.
        """
        on_device = torch.cuda.device(self.device) if self.on_cuda else cpu_scope()
        with on_device, engine_stand_ins():
            yield

    def seed(self, seed: int) -> None:
        """Seed every generator; tensor- and expert-parallel ranks get different RNG states.

        Outside of tensor-parallel regions the ranks of a model replica have to draw the same
        numbers: give them the same seed. Call it after `init_model_parallel`.
        """
        # The state outside of tensor-parallel regions, then the tracker of those inside.
        torch.manual_seed(seed)
        with self.scope():
            tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def free_cached_memory(self) -> None:
        """Release the caching allocator's unused memory."""
        if self.on_cuda:
            torch.cuda.empty_cache()


def place_parameters(
    chunks: Sequence[nn.Module],
    runtime: Runtime,
    *,
    on_device: bool,
    host_buffers: OffloadBuffers,
) -> None:
    """Move the parameters onto the device, or to the CPU.

    With a distributed optimizer parameters are views of a data-parallel buffer. Its storage is
    released and filled again in place, so the views stay valid. All others are kept in
    `host_buffers`, which belong to this model.
    """
    if not runtime.on_cuda:
        return
    device = runtime.device if on_device else torch.device("cpu")
    others: list[torch.Tensor] = []
    with runtime.scope():
        for chunk in chunks:
            buffers = _parameter_buffers(chunk)
            for buffer in buffers:
                if on_device:
                    buffer.reload_from_cpu(move_params=True, move_grads=False)
                else:
                    buffer.offload_to_cpu(move_params=True, move_grads=False)
            # A view must not get storage of its own: updates are gathered into the buffer.
            inside = {id(parameter) for buffer in buffers for parameter in buffer.params}
            others += (each for each in chunk.parameters() if id(each) not in inside)
            others += nn.Module.buffers(chunk)
        for tensor, moved in zip(others, host_buffers.moved(others, device), strict=True):
            tensor.data = moved
        if not on_device:
            # Megatron-core's copies of its buffers.
            torch.cuda.synchronize()


def _parameter_buffers(chunk: nn.Module) -> list[_ParamAndGradBuffer]:
    """Return the data-parallel buffers of a chunk that hold parameters."""
    buffers: list[_ParamAndGradBuffer] = []
    for name in ("buffers", "expert_parallel_buffers"):
        found = getattr(chunk, name, None)
        # `nn.Module.buffers` is a method; data parallelism replaces it by a list.
        if isinstance(found, list):
            buffers += (buffer for buffer in found if buffer.param_data is not None)
    return buffers
