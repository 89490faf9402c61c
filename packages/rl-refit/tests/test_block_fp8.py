"""Block-FP8 against transformers' own quantisation, and shards against the whole."""

import itertools

import pytest
import torch
from rl_refit import block_fp8
from rl_refit.block_fp8 import (
    BLOCK,
    block_maxima,
    dequantize,
    quantize,
    quantize_shard,
    scales_of,
    scales_shape,
)

SHAPES = [(1, 1), (128, 128), (130, 257), (384, 96), (3, 200, 130)]


def values_of(shape, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    # Each block of another magnitude.
    rows = torch.arange(shape[-2])[:, None] // BLOCK
    return values * 10.0 ** (rows - 3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_is_within_half_a_step_of_float8(shape, dtype):
    values = values_of(shape).to(dtype)
    quantized, scales = quantize(values)
    assert (quantized.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert (quantized.shape, scales.shape) == (shape, scales_shape(shape))
    found = dequantize(quantized, scales)
    each = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    each = each[..., : shape[-2], : shape[-1]]
    # Three bits of mantissa: half a step is 1/16 of a value; 2^-10 is half of the least subnormal.
    allowed = torch.maximum(values.float().abs() / 16, each * 2**-10)
    assert ((found - values.float()).abs() <= allowed * (1 + 1e-5)).all()
    for row, column in itertools.product(*(range(0, length, BLOCK) for length in shape[-2:])):
        block = quantized.float()[..., row : row + BLOCK, column : column + BLOCK]
        assert (block.abs().amax((-2, -1)) == 448.0).all(), "the largest of a block is float8's"


def test_transformers_reads_what_is_written():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    values = values_of((256, 384))
    quantized, scales = quantize(values)
    operation = fp8.Fp8Dequantize(None)
    read = operation._dequantize_one(quantized, scales)
    assert torch.equal(read.float(), dequantize(quantized, scales).to(read.dtype).float())


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("num_shards", [2, 3, 7])
def test_shards_quantise_to_those_of_the_whole(dim, num_shards):
    values = values_of((300, 500))
    expected, scales = quantize(values)
    shards = values.chunk(num_shards, dim)
    begins = itertools.accumulate((each.shape[dim] for each in shards[:-1]), initial=0)
    starts = [(begin, 0) if dim == -2 else (0, begin) for begin in begins]
    maxima = [
        block_maxima(shard, values.shape, start)
        for shard, start in zip(shards, starts, strict=True)
    ]
    assert any((each == 0).any() for each in maxima), "a shard knows a part of the blocks"
    assert torch.equal(scales_of(torch.stack(maxima).amax(0)), scales)
    found = [
        quantize_shard(shard, scales, start) for shard, start in zip(shards, starts, strict=True)
    ]
    assert torch.equal(torch.cat(found, dim).float(), expected.float())


def test_zeros_and_tiny_values_stay_finite():
    values = torch.zeros(200, 200)
    values[150, 150] = 1e-44
    quantized, scales = quantize(values)
    assert torch.equal(scales, torch.ones(2, 2))
    assert not quantized.float().any()
    assert block_maxima(values[:0], values.shape, (200, 0)).shape == (2, 2)
    assert quantize_shard(values[:0], scales, (200, 0)).shape == (0, 200)
    assert block_fp8.SCALES == "_scale_inv"
