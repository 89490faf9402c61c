"""Who this process is among the ranks of a job, on which device, and the group that they form."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """One rank as torchrun's environment variables describe it."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @classmethod
    def from_environment(cls) -> RankEnvironment:
        """Read the variables; the device is this rank's GPU, or the CPU where there is none.

        Raises:
            RuntimeError: A variable is missing.
        """
        missing = [name for name in _RANK_VARIABLES if name not in os.environ]
        if missing:
            raise RuntimeError(
                f"the environment variables {missing} are not set: start the worker under "
                "torchrun, rl-policy, or set them before it is constructed"
            )
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        else:
            device = torch.device("cpu")
        return cls(
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            local_rank=local_rank,
            device=device,
        )


def init_process_group(environment: RankEnvironment, *, timeout_s: float) -> bool:
    """Join the default process group; False when the caller had already joined it.

    On CUDA the group carries CPU tensors over gloo too, for offloaded parameters.
    """
    if dist.is_initialized():
        return False
    on_cuda = environment.device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(environment.device)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        timeout=timedelta(seconds=timeout_s),
    )
    return True


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """End groups that this rank is in, but not the default one, which may be another's.

    Each group has threads and sockets, which go with it. Not collective.
    """
    if not dist.is_initialized():
        return  # they ended with the default group
    for group in dict.fromkeys(groups):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
