"""The parallel layout and its device meshes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist
from rl_interfaces import ParallelLayout
from rl_interfaces.backend.runtime import destroy_groups
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    from rl_dtensor_worker.config import Resolved

logger = logging.getLogger(__name__)

_PATH = "policy.dtensor_cfg"
# Parameters, gradients and both moments of Adam, in float32.
_TRAINING_BYTES = 16
# 16 million parameters in float32: small beside any device's memory.
_SMALL_BYTES = 2**28


def plan_layout(config: Resolved, *, world_size: int) -> ParallelLayout:
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
    if section.get("custom_parallel_plan") and tensor == 1:
        raise ValueError(
            f"{_PATH}.custom_parallel_plan={section['custom_parallel_plan']!r} needs "
            f"{_PATH}.tensor_parallel_size > 1, got {tensor}"
        )
    layout = ParallelLayout(
        data_parallel=world_size // (tensor * context),
        context_parallel=context,
        tensor_parallel=tensor,
    )
    replicas = section["data_parallel_replicate_size"]
    if replicas != "auto" and (replicas < 1 or layout.data_parallel % replicas):
        raise ValueError(
            f"{_PATH}.data_parallel_replicate_size={replicas} does not divide the "
            f"{layout.data_parallel} data-parallel ranks"
        )
    return layout


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingChoice:
    """How the parameters are sharded, as far as it depends on the size of the model."""

    replicas: int
    """Copies of the model among the data-parallel ranks; each copy is sharded over the others."""
    is_small: bool
    """Whether gathering a layer takes longer than computing it: the model is then one FSDP unit,
    or none where nothing is sharded."""


def choose_sharding(
    layout: ParallelLayout, *, replicas: int | Literal["auto"], num_parameters: int
) -> ShardingChoice:
    """Return how a model of this size is sharded.

    Sharding saves memory and costs an all-gather per FSDP unit and pass. A training state of at
    most `_SMALL_BYTES` is not worth an all-gather per layer, nor, with `replicas="auto"`, any.

    Args:
        layout: Of all ranks.
        replicas: `data_parallel_replicate_size` of the config.
        num_parameters: Of the full model.
    """
    state_bytes = _TRAINING_BYTES * num_parameters // layout.tensor_parallel
    is_small = state_bytes <= _SMALL_BYTES
    if replicas == "auto":
        replicas = layout.data_parallel if is_small else 1
    if is_small and layout.data_parallel * layout.context_parallel > 1:
        shards = layout.data_parallel // replicas * layout.context_parallel
        logger.info(
            "The training state takes %.1f MiB: %s",
            state_bytes / 2**20,
            f"it is sharded over {shards} ranks and gathered at once, not layer by layer"
            if shards > 1
            else f"{replicas} data-parallel ranks have a copy each",
        )
    return ShardingChoice(replicas=replicas, is_small=is_small)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """Views of the ranks in one order; tensor-parallel ranks are neighbours."""

    data: DeviceMesh
    """Axes `dp`, `cp`, `tp`: how rows and tokens are sharded."""
    state: DeviceMesh
    """Axes `dp_replicate`, `dp_shard_cp`, `tp`: how parameters are sharded."""
    replicas: DeviceMesh
    """Axes `dp_replicate`, `shards`: the same with all shards of one replica on one axis."""

    @classmethod
    def of(cls, layout: ParallelLayout, *, replicas: int, device_type: str) -> Meshes:
        """Return the meshes of `layout`, with `replicas` replicas of the parameters."""
        # Context-parallel ranks have the same rows, but shard parameters like data-parallel ones.
        sharded = layout.data_parallel // replicas * layout.context_parallel
        tensor = layout.tensor_parallel
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
            replicas=init_device_mesh(
                device_type, (replicas, sharded * tensor), mesh_dim_names=("dp_replicate", "shards")
            ),
        )

    def leave(self) -> None:
        """Destroy the meshes' groups and DTensor's references to them. Not collective.

        DTensor caches sharding decisions together with the meshes that they were made for. A mesh
        holds its groups, whose threads would otherwise run on, and a later mesh may compare equal
        to it while its groups have other names.
        """
        # Here, as drivers plan layouts without DTensor.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        meshes = (self.data, self.state, self.replicas)
        destroy_groups(group for mesh in meshes for group in mesh.get_all_groups())
        for mesh in meshes:
            # Private, as torch has no public call by which a mesh forgets its groups.
            mesh._pg_registry.clear()
        _clear_sharding_prop_cache()

    @property
    def shards(self) -> dist.ProcessGroup:
        """The ranks that hold the shards of one replica, this one included."""
        return self.replicas["shards"].get_group()

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh over which FSDP shards and, with several replicas, replicates."""
        # A second axis makes FSDP replicate, with an all-reduce of its own in every backward pass.
        if self.state["dp_replicate"].size() == 1:
            return self.state["dp_shard_cp"]
        return self.state["dp_replicate", "dp_shard_cp"]

    @property
    def tp(self) -> DeviceMesh:
        """The tensor-parallel ranks."""
        return self.state["tp"]
