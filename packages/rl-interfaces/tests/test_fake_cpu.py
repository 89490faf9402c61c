"""The fake CPU: what its collectives take, as gloo's or as NCCL's."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rl_interfaces.backend.fake import fake_cpu

pytestmark = pytest.mark.needs("rl-interfaces[backend]")

NUM_BYTES, RANKS = 4096, 4


def of_processes(full):
    dist.reduce_scatter_tensor(torch.empty(full.numel() // RANKS), full)


def of_tensors(full):
    functional.reduce_scatter_tensor(full, "sum", 0, dist.group.WORLD)


@pytest.mark.parametrize("call", [of_processes, of_tensors])
def test_gloo_reduces_and_scatters_a_copy(call):
    peaks = {}
    for has_cuda_kernels in (False, True):
        with fake_cpu(world_size=RANKS, has_cuda_kernels=has_cuda_kernels) as device:
            full = torch.ones(NUM_BYTES // 4)
            with device.phase() as figures:
                call(full)
            # The copy ends with the call.
            assert device.live_bytes == NUM_BYTES
            peaks[has_cuda_kernels] = figures.peak_bytes
    assert peaks[False] == 2 * NUM_BYTES + NUM_BYTES // RANKS
    assert peaks[True] < 2 * NUM_BYTES
