"""Context-parallel attention, against torch's over each full sequence."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from context_ranks import attend_to_shards
from rl_batched_data import PackedSequences
from rl_dtensor_worker.attention import causal_band
from tolerances import REPEATED


def packed_of(lengths, *, num_ranks):
    return PackedSequences.of(torch.tensor(lengths), max(lengths), pad_multiple=2 * num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("lengths", [[12], [24, 24], [17, 1, 9, 16, 2]])
def test_values_and_gradients_equal_full_sequences(pools, num_ranks, window, key_heads, lengths):
    torch.manual_seed(0)
    packed = packed_of(lengths, num_ranks=num_ranks)
    total = packed.total_length
    query = torch.randn(1, 2, total, 8, requires_grad=True)
    key, value = (torch.randn(1, key_heads, total, 8, requires_grad=True) for _ in range(2))
    weights = torch.randn(1, total, 2, 8)
    outputs = []
    edges = packed.cu_seqlens.tolist()
    for start, end in itertools.pairwise(edges):
        part = [states[:, :, start:end] for states in (query, key, value)]
        mask = causal_band(end - start, window, device=torch.device("cpu"))
        out = F.scaled_dot_product_attention(
            *part, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        outputs.append(out.transpose(1, 2))
    expected = torch.cat(outputs, dim=1)
    (expected * weights).sum().backward()
    for attended in pools(num_ranks).run(
        attend_to_shards,
        states=[states.detach() for states in (query, key, value)],
        weights=weights,
        lengths=lengths,
        window=window,
    ):
        atol = REPEATED * float(expected.abs().max())
        torch.testing.assert_close(attended.output, expected.detach(), atol=atol, rtol=0)
        for found, states in zip(attended.gradients, (query, key, value), strict=True):
            atol = REPEATED * float(states.grad.abs().max())
            torch.testing.assert_close(found, states.grad, atol=atol, rtol=0)
