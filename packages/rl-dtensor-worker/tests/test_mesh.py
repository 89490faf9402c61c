"""What it takes to make the meshes of a large job, on a process group that sends nothing."""

import pytest
import torch.distributed as dist
from rl_dtensor_worker.parallel.mesh import Meshes
from rl_interfaces import ParallelLayout
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

MOST_PER_AXIS = 3


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (8, 1), (8, 2)])
@pytest.mark.parametrize("world_size", [512, 1024])
def test_no_rank_waits_for_all_others_once_per_group(world_size, tensor, context, monkeypatch):
    """An axis of size 1 has a group for each rank: a barrier after each would be thousands."""
    barriers = []
    monkeypatch.setattr(
        distributed_c10d, "_store_based_barrier", lambda *given, **more: barriers.append(given)
    )
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    barriers.clear()
    try:
        layout = ParallelLayout(
            data_parallel=world_size // (tensor * context),
            context_parallel=context,
            tensor_parallel=tensor,
        )
        meshes = Meshes.of(layout, replicas=1, device_type="cpu")
        axes = sum(len(mesh.shape) for mesh in (meshes.data, meshes.state, meshes.replicas))
        assert len(barriers) <= MOST_PER_AXIS * axes
        meshes.leave()
    finally:
        dist.destroy_process_group()
