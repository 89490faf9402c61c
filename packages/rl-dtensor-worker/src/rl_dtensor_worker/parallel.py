"""Who this process is, on which device, and where it stands in the device mesh."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rl_interfaces import ParallelLayout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    from collections.abc import Mapping

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def plan_layout(config: Mapping[str, Any], *, world_size: int) -> ParallelLayout:
    """Return the layout of `world_size` ranks under a resolved policy config.

    Raises:
        ValueError: The sizes do not divide the world, or are not supported.
    """
    section = config["dtensor_cfg"]
    for key in ("tensor_parallel_size", "context_parallel_size"):
        size = section[key]
        if size < 1:
            raise ValueError(f"policy.dtensor_cfg.{key}={size} must be at least 1")
        if world_size % size:
            raise ValueError(
                f"policy.dtensor_cfg.{key}={size} does not divide world_size={world_size}"
            )
        if size > 1:
            raise ValueError(
                f"policy.dtensor_cfg.{key}={size} is not supported by this version of the "
                "dtensor backend, which shards over data-parallel ranks: set it to 1"
            )
    if section["sequence_parallel"]:
        raise ValueError(
            "policy.dtensor_cfg.sequence_parallel=True needs "
            f"policy.dtensor_cfg.tensor_parallel_size > 1, got {section['tensor_parallel_size']}"
        )
    if "custom_parallel_plan" in section:
        raise ValueError(
            f"policy.dtensor_cfg.custom_parallel_plan={section['custom_parallel_plan']!r} needs "
            f"policy.dtensor_cfg.tensor_parallel_size > 1, got {section['tensor_parallel_size']}"
        )
    return ParallelLayout(data_parallel=world_size)


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


def build_mesh(layout: ParallelLayout, *, device_type: str) -> DeviceMesh:
    """Return the mesh with the axes `dp`, `cp` and `tp`; tensor-parallel ranks are neighbours."""
    shape = (layout.data_parallel, layout.context_parallel, layout.tensor_parallel)
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp", "cp", "tp"))
