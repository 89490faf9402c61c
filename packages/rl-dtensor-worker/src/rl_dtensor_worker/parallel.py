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
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

if TYPE_CHECKING:
    from collections.abc import Mapping

_PATH = "policy.dtensor_cfg"
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def plan_layout(config: Mapping[str, Any], *, world_size: int) -> ParallelLayout:
    """Return the layout of `world_size` ranks under a resolved policy config.

    Raises:
        ValueError: The sizes do not divide the world, or contradict each other.
    """
    section = config["dtensor_cfg"]
    tensor, context = section["tensor_parallel_size"], section["context_parallel_size"]
    for key in ("tensor_parallel_size", "context_parallel_size"):
        if section[key] < 1:
            raise ValueError(f"{_PATH}.{key}={section[key]} must be at least 1")
    if world_size % (tensor * context):
        raise ValueError(
            f"{_PATH}.tensor_parallel_size={tensor} times {_PATH}.context_parallel_size={context} "
            f"does not divide world_size={world_size}"
        )
    for key in ("sequence_parallel", "custom_parallel_plan"):
        if section.get(key) and tensor == 1:
            raise ValueError(
                f"{_PATH}.{key}={section[key]!r} needs {_PATH}.tensor_parallel_size > 1, "
                f"got {tensor}"
            )
    layout = ParallelLayout(
        data_parallel=world_size // (tensor * context),
        context_parallel=context,
        tensor_parallel=tensor,
    )
    replicas = section["data_parallel_replicate_size"]
    if replicas < 1 or layout.data_parallel % replicas:
        raise ValueError(
            f"{_PATH}.data_parallel_replicate_size={replicas} does not divide the "
            f"{layout.data_parallel} data-parallel ranks"
        )
    return layout


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


def leave_process_group() -> None:
    """Leave the default process group, for this process to join another one.

    DTensor remembers how it shards each operation, with the mesh that it saw first. A mesh of the
    next group may equal that one while its groups have other names, so the memory is cleared.
    """
    dist.destroy_process_group()
    _clear_sharding_prop_cache()


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """The ranks in two views of one order: tensor-parallel ranks are neighbours."""

    data: DeviceMesh
    """Axes `dp`, `cp`, `tp`: which rows and tokens a rank has."""
    state: DeviceMesh
    """Axes `dp_replicate`, `dp_shard_cp`, `tp`: which part of each parameter a rank has."""
    shards: dist.ProcessGroup
    """The ranks that have the parts of one copy of the parameters, this one among them."""

    @classmethod
    def of(cls, layout: ParallelLayout, *, replicas: int, device_type: str) -> Meshes:
        """Return the meshes of `layout`, with `replicas` whole copies of the parameters."""
        sharded = layout.data_parallel // replicas * layout.context_parallel
        tensor = layout.tensor_parallel
        copies = init_device_mesh(
            device_type, (replicas, sharded * tensor), mesh_dim_names=("dp_replicate", "shards")
        )
        return cls(
            data=init_device_mesh(
                device_type,
                (layout.data_parallel, layout.context_parallel, tensor),
                mesh_dim_names=("dp", "cp", "tp"),
            ),
            state=init_device_mesh(
                device_type,
                (replicas, sharded, tensor),
                mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"),
            ),
            shards=copies["shards"].get_group(),
        )

    @property
    def fsdp(self) -> DeviceMesh:
        """The ranks over which FSDP shards, and over which it replicates where it does."""
        if self.state["dp_replicate"].size() == 1:
            return self.state["dp_shard_cp"]
        return self.state["dp_replicate", "dp_shard_cp"]

    @property
    def tp(self) -> DeviceMesh:
        """The ranks that share each layer."""
        return self.state["tp"]
