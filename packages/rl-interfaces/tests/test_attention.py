"""Attention in linear memory: against plain scores, and what the kernels are asked for."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from rl_interfaces.backend import attention
from rl_interfaces.backend.attention import (
    RowGroups,
    attend,
    attend_to_cache,
    attend_to_packed,
    takes_packed,
    takes_shared_keys,
)
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.needs("rl-interfaces[backend]")

# The inputs are float64: what differs is the order of sums.
TOLERANCE = {"rtol": 0, "atol": 1e-12}


class Calls(TorchFunctionMode):
    """Keeps the arguments of each call of torch's attention."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.made.append((args, kwargs))
        return func(*args, **(kwargs or {}))


def states(heads, key_heads, queries, keys, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, queries, 8), *[(2, key_heads, keys, 8)] * 2]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [each.to(dtype).requires_grad_() for each in made]


def plain(query, key, value, mask):
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


def band(queries, keys, window=None):
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries - window + 1)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 9)])
@pytest.mark.parametrize("window", [None, 4])
def test_values_and_gradients_are_those_of_plain_scores(key_heads, queries, keys, window):
    inputs = states(4, key_heads, queries, keys)
    mask = None if window is None else band(queries, keys, window)[None, None]
    own = attend(*inputs, mask)
    expected = plain(*inputs, band(queries, keys, window))
    torch.testing.assert_close(own, expected, **TOLERANCE)
    weights = torch.randn_like(expected)
    for found, wanted in zip(
        torch.autograd.grad((own * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, **TOLERANCE)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_one_token_per_row_sees_the_keys_of_its_row(key_heads):
    query, keys, values = states(4, key_heads, 1, 9)
    mask = torch.arange(9) < torch.tensor([3, 9])[:, None]
    own = attend_to_cache(query[:, :, 0], keys, values, mask)
    expected = plain(query, keys, values, mask[:, None, None])[:, :, 0]
    torch.testing.assert_close(own, expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_masked", [False, True])
def test_no_kernel_is_asked_for_shared_keys_beside_a_mask(dtype, is_masked):
    """On CUDA none takes both, and the scores of all pairs would be materialised."""
    for (queries, keys), key_heads in itertools.product([(6, 6), (3, 9)], [1, 4]):
        inputs = states(4, key_heads, queries, keys, dtype)
        with Calls() as calls:
            attend(*inputs, band(queries, keys)[None, None] if is_masked else None)
        ((args, arguments),) = calls.made
        query, key, value = args
        mask = arguments["attn_mask"]
        has_mask = mask is not None and not isinstance(mask, CausalBias)
        assert has_mask == is_masked
        shares = key.shape[1] != query.shape[1]
        assert arguments["enable_gqa"] == shares
        assert not (has_mask and shares)
        assert key.shape[1] == value.shape[1]
    query, keys, values = states(4, 1, 1, 9, dtype)
    with Calls() as calls:
        attend_to_cache(query[:, :, 0], keys, values, torch.ones(2, 9, dtype=torch.bool))
    ((args, arguments),) = calls.made
    assert args[0].shape[1] == args[1].shape[1]
    assert not arguments.get("enable_gqa")


def test_only_flash_takes_shared_keys_on_a_gpu():
    assert takes_shared_keys("cuda", torch.bfloat16, head_size=128)
    assert not takes_shared_keys("cuda", torch.float32, head_size=128)
    assert not takes_shared_keys("cuda", torch.bfloat16, head_size=512)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_masked", [False, True])
def test_on_a_gpu_memory_is_linear_in_the_keys(dtype, is_masked):
    heads, key_heads, queries, keys, size = 32, 8, 4096, 16384, 128
    device = torch.device("cuda")
    shapes = [(1, heads, queries, size), *[(1, key_heads, keys, size)] * 2]
    inputs = [
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes
    ]
    mask = band(queries, keys).to(device)[None, None] if is_masked else None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    attend(*inputs, mask).sum().backward()
    peak = torch.cuda.max_memory_allocated(device) - before
    # Keys, values and gradients, repeated; the mask as a bias, once for all heads.
    linear = 8 * heads * keys * size * dtype.itemsize + 3 * queries * keys * dtype.itemsize
    assert peak < linear < heads * queries * keys * dtype.itemsize


def test_rows_are_gathered_together_and_their_gradients_summed():
    states = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    groups = [torch.tensor([[0, 1, 2], [3, 4, 4]]), torch.tensor([[4, 1]])]
    gathered = RowGroups.of(groups).gather(states)
    for rows, tokens in zip(gathered, groups, strict=True):
        assert torch.equal(rows, states[tokens])
    weights = [torch.randn_like(rows) for rows in gathered]
    total = sum((rows * weight).sum() for rows, weight in zip(gathered, weights, strict=True))
    expected = torch.zeros_like(states)
    for tokens, weight in zip(groups, weights, strict=True):
        expected.index_put_((tokens,), weight, accumulate=True)
    torch.testing.assert_close(torch.autograd.grad(total, states)[0], expected, **TOLERANCE)


def test_a_cpu_takes_rows():
    states = torch.randn(5, 2, 8, dtype=torch.bfloat16)
    assert not takes_packed(states, states)


@pytest.mark.parametrize("shares", [True, False])
def test_the_packed_kernel_is_given_shared_keys_as_its_version_takes_them(monkeypatch, shares):
    made = []

    def varlen_attn(*args, **kwargs):
        made.append((args, kwargs))
        return args[0]

    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "_PACKED_SHARES_KEYS", shares)
    query, key, value = (torch.randn(5, heads, 8) for heads in (8, 2, 2))
    attend_to_packed(query, key, value, torch.tensor([0, 5]), max_seqlen=5)
    ((_, given_key, given_value, *_), options) = made[0]
    assert ("enable_gqa" in options) == shares
    for given, wanted in ((given_key, key), (given_value, value)):
        assert given.shape[1] == (2 if shares else 8)
        assert torch.equal(given[:, :: given.shape[1] // 2], wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("key_heads", [2, 8])
def test_the_flash_kernel_for_packed_sequences_gives_that_of_each_alone(window, key_heads):
    torch.manual_seed(0)
    lengths = [130, 1, 64, 257]
    query, key, value = (
        torch.randn(sum(lengths), heads, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (8, key_heads, key_heads)
    )
    assert takes_packed(query, value)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda").int()
    own = attend_to_packed(
        query, key, value, cu_seqlens, max_seqlen=max(lengths), sliding_window=window, scale=0.1
    )
    inputs = (query, key, value)
    alone = []
    for parts in zip(*(each.float().split(lengths) for each in inputs), strict=True):
        rows = [part.transpose(0, 1)[None] for part in parts]
        mask = band(len(parts[0]), len(parts[0]), window).cuda()[None, None]
        alone.append(attend(*rows, mask, scale=0.1)[0].transpose(0, 1))
    expected = torch.cat(alone)
    # bfloat16 has 8 bits: sums of values near 1 differ by their rounding.
    torch.testing.assert_close(own.float(), expected, rtol=0, atol=2e-2)
    weights = torch.randn_like(expected)
    for found, wanted in zip(
        torch.autograd.grad((own.float() * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        scale = float(wanted.float().abs().max())
        torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=2e-2 * scale)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window", [None, 2])
def test_a_sink_is_one_more_score_whose_value_is_zero(window, scale):
    query, key, value = states(4, 2, 3, 5)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)
    distance = torch.arange(2, 5)[:, None] - torch.arange(5)
    mask = (distance >= 0) & (distance < (window or 9))
    scores = query @ key.repeat_interleave(2, 1).mT * (8**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(2, 4, 3, 1)], -1)
    expected = scores.softmax(-1)[..., :-1] @ value.repeat_interleave(2, 1)
    # Without a window causal attention needs no mask.
    given = None if window is None else mask
    found = attend(query, key, value, given, scale=scale, sinks=sinks)
    torch.testing.assert_close(found, expected, **TOLERANCE)
