"""The device of this rank, and the scope in which Megatron-core is called."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from megatron.core import tensor_parallel

from rl_megatron_worker.compat.cpu_scope import cpu_scope
from rl_megatron_worker.compat.patches import engine_stand_ins

if TYPE_CHECKING:
    from collections.abc import Generator

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
        torch.manual_seed(seed)
        with self.scope():
            tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def free_cached_memory(self) -> None:
        """Release the caching allocator's unused memory."""
        if self.on_cuda:
            torch.cuda.empty_cache()
