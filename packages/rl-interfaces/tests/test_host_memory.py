"""Copies in host memory: their values, and how much memory they take."""

from itertools import pairwise

import pytest
import torch
from rl_interfaces.backend.components import ReferenceCopy
from rl_interfaces.backend.host_memory import (
    HostCopies,
    OffloadBuffers,
    block_sizes,
    place_whole,
)

pytestmark = pytest.mark.needs("rl-interfaces[backend]")


def some_tensors(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(5, 70, generator=generator),
        torch.randn(30, 11, generator=generator).T,  # not contiguous
        torch.randn(0, 4),
        torch.randn(7, generator=generator, dtype=torch.float64),
        torch.randint(9, (13,), generator=generator),
        torch.randn(3, 500, generator=generator).bfloat16(),
    ]
    return [each.to(device) for each in made]


@pytest.mark.parametrize("block_bytes", [64, 256, 2**26])
def test_what_was_read_is_written_bit_by_bit(block_bytes):
    tensors = some_tensors()
    copies = HostCopies(tensors, block_bytes=block_bytes)
    copies.read(tensors)
    wanted = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    copies.write(tensors)
    assert all(torch.equal(*pair) for pair in zip(tensors, wanted, strict=True))


def test_a_copy_may_be_kept_in_another_dtype():
    tensors = [torch.randn(100), torch.randn(100)]
    copies = HostCopies(tensors, dtypes=[torch.bfloat16, torch.float32], block_bytes=256)
    copies.read(tensors)
    written = [torch.empty(100), torch.empty(100)]
    copies.write(written)
    assert torch.equal(written[0], tensors[0].bfloat16().float())
    assert torch.equal(written[1], tensors[1])


@pytest.mark.parametrize("num_bytes", [0, 1, 64, 1000, 2**26, 2**26 + 1, 5 * 2**26 + 2**25 + 12345])
def test_blocks_are_powers_of_two_and_hardly_more_than_is_needed(num_bytes):
    """torch rounds page-locked memory up to a power of two: 33 GiB in one piece took 64."""
    sizes = block_sizes(num_bytes)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert num_bytes <= sum(sizes) <= num_bytes + 2**25 + 64


def test_a_model_of_many_tensors_takes_its_own_size():
    with torch.device("meta"):
        shapes = [torch.empty(8192, 28672 // 8), torch.empty(8192 + 1)] * 80
    num_bytes = 2 * sum(tensor.numel() for tensor in shapes)
    assert sum(block_sizes(num_bytes)) < 1.01 * num_bytes


def test_the_reference_is_kept_in_a_dtype_and_the_policy_comes_back_bit_by_bit():
    live = [torch.randn(1000), torch.randn(64)]
    start = [tensor.clone() for tensor in live]
    reference = ReferenceCopy(lambda: live, dtypes=[torch.bfloat16, torch.float32])
    trained = [tensor.add_(1 / 3).clone() for tensor in live]
    with reference.swapped_in():
        assert torch.equal(live[0], start[0].bfloat16().float())
        assert torch.equal(live[1], start[1])
        # Half of float32 for the reference, and the policy as it is.
        assert reference.num_bytes == sum(map(sum, map(block_sizes, (2048 + 256, 4032 + 256))))
    assert all(torch.equal(*pair) for pair in zip(live, trained, strict=True))


def test_a_tensor_stays_whole_in_its_block():
    sizes = [64 * count for count in (3, 1, 5, 2, 8, 8, 8, 8, 8, 8, 8, 8, 8, 3)]
    blocks, places = place_whole(sizes)
    assert blocks == [4096, 1024 + 1024]
    used = [range(start, start + size) for (_, start), size in zip(places, sizes, strict=True)]
    for index, block in enumerate(blocks):
        spans = sorted(
            (span.start, span.stop)
            for (place, _), span in zip(places, used, strict=True)
            if place == index
        )
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
        assert spans[-1][1] <= block
    assert place_whole([]) == ([], [])


def test_what_is_there_already_does_not_move():
    buffers, tensors = OffloadBuffers(), some_tensors()
    moved = buffers.moved(tensors, torch.device("cpu"))
    assert all(a is b for a, b in zip(moved, tensors, strict=True))
    assert buffers.num_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_offloads_use_the_same_page_locked_memory():
    buffers, device = OffloadBuffers(), torch.device("cuda", torch.cuda.current_device())
    tensors = some_tensors(device)
    for _ in range(2):
        wanted = [tensor.cpu() for tensor in tensors]
        offloaded = buffers.moved(tensors, torch.device("cpu"))
        assert all(each.is_pinned() for each in offloaded if each.numel())
        assert all(torch.equal(*pair) for pair in zip(offloaded, wanted, strict=True))
        assert all(a.stride() == b.stride() for a, b in zip(offloaded, tensors, strict=True))
        places = [each.data_ptr() for each in offloaded]
        tensors = [each.mul_(2) for each in buffers.moved(offloaded, device)]
    assert [each.data_ptr() for each in buffers.moved(tensors, torch.device("cpu"))] == places


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_copies_are_page_locked_and_bit_exact():
    tensors = some_tensors("cuda")
    copies = HostCopies(tensors, block_bytes=256)
    assert all(block.is_pinned() for block in copies.blocks)
    copies.read(tensors)
    wanted = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    copies.write(tensors)
    assert all(torch.equal(*pair) for pair in zip(tensors, wanted, strict=True))
