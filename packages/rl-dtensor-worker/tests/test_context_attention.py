"""Attention over sequences that are cut over ranks, against torch's over each whole sequence."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from context_ranks import attend_in_parts
from rl_batched_data import PackedSequences
from rl_dtensor_worker.attention.context import ContextRows
from rl_dtensor_worker.attention.packed import causal_band


class FakeGroup:
    """A group as far as a plan of chunks asks: who this rank is, and how many there are."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def packed_of(lengths, *, num_ranks):
    return PackedSequences.of(torch.tensor(lengths), max(lengths), pad_multiple=2 * num_ranks)


def test_a_rank_has_a_chunk_from_the_front_and_one_from_the_back():
    packed = packed_of([8, 3], num_ranks=2)
    rows = [ContextRows.of(packed, FakeGroup(rank, 2)) for rank in range(2)]
    assert rows[0].own.tolist() == [0, 1, 6, 7, 8, 11]
    assert rows[1].own.tolist() == [2, 3, 4, 5, 9, 10]
    joined = torch.cat([rows[0].own, rows[1].own])
    assert joined[rows[0].gathered].tolist() == list(range(12))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_rank_has_the_same_work(num_ranks):
    packed = packed_of([64, 40, 7, 5], num_ranks=num_ranks)
    work = []
    for rank in range(num_ranks):
        rows = ContextRows.of(packed, FakeGroup(rank, num_ranks))
        work.append(sum(c.queries.numel() * c.keys.shape[1] for c in rows.chunks))
    assert max(work) == min(work)


@pytest.mark.slow_beyond(5, every=5)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("lengths", [[12], [24, 24], [17, 1, 9, 16, 2]])
def test_values_and_gradients_equal_whole_sequences(pools, num_ranks, window, key_heads, lengths):
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
    for rank_result in pools(num_ranks).run(
        attend_in_parts,
        states=[states.detach() for states in (query, key, value)],
        weights=weights,
        lengths=lengths,
        window=window,
    ):
        output, gradients = rank_result
        torch.testing.assert_close(output, expected.detach(), atol=1e-6, rtol=1e-5)
        for found, states in zip(gradients, (query, key, value), strict=True):
            torch.testing.assert_close(found, states.grad, atol=1e-5, rtol=1e-5)
