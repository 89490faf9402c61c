"""On which device this rank computes, and the scope in which Megatron-core does so."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from megatron.core import tensor_parallel

from rl_megatron_worker.compat.cpu_scope import cpu_scope
from rl_megatron_worker.compat.stand_ins import engine_stand_ins

if TYPE_CHECKING:
    from collections.abc import Generator

    from rl_interfaces.backend.runtime.ranks import RankEnvironment


def may_have_gpus() -> bool:
    """Return whether ranks may have GPUs that run what is installed here.

    A driver often runs where there is none, and starts ranks elsewhere with the same packages.
    """
    return torch.backends.cuda.is_built()


class Runtime:
    """The device of one rank. Nothing else in this package asks for it.

    Args:
        environment: The rank.
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
        """Enter around every call of Megatron-core, in the thread that makes it.

        It may be entered again inside, which costs next to nothing.

        Raises:
            RuntimeError: This megatron-core cannot be run on the CPU.
        """
        on_device = torch.cuda.device(self.device) if self.on_cuda else cpu_scope()
        with on_device, engine_stand_ins():
            yield

    def seed(self, seed: int) -> None:
        """Seed every generator; tensor- and expert-parallel ranks get streams of their own.

        Ranks that share each layer draw alike outside of its parallel parts, so they are to be
        given the same seed. Call it once model parallelism is set up.
        """
        torch.manual_seed(seed)
        with self.scope():
            tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def free_cached_memory(self) -> None:
        """Return the memory that the allocator caches to the device."""
        if self.on_cuda:
            torch.cuda.empty_cache()
