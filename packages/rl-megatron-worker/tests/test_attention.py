"""Attention over packed sequences against a plain one in float64, context-parallel or not."""

import pytest
import torch
from attention_ranks import context_ranks, plain_attention
from rl_megatron_worker.attention import PackedAttention
from rl_megatron_worker.compat.cpu_scope import cpu_scope
from rl_megatron_worker.layout import PackedRows
from rl_megatron_worker.model.config import DecoderConfig
from tolerances import FLOAT64

# The inputs are float64: what differs is the order of sums.
TOLERANCE = FLOAT64

LENGTHS = {
    "one": [8],
    "alike": [8, 8],
    "unlike": [12, 4, 8, 16, 4],
    "of-one-token": [1, 1, 5],
    "with-none": [0, 4, 0],
}


def edges_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_values_and_gradients_are_those_of_each_sequence_alone(case, groups):
    lengths, heads, size = LENGTHS[case], 4, 8
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(lengths), each, size) for each in (heads, groups, groups)]
    inputs = [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]
    weights = torch.randn(sum(lengths), heads * size, dtype=torch.float64, generator=generator)
    with cpu_scope():
        config = DecoderConfig(num_layers=1, hidden_size=heads * size, num_attention_heads=heads)
        attention = PackedAttention(config, 1, None, "self")
        rows = PackedRows.of(edges_of(lengths), max_seqlen=max(lengths), group=None)
        own = attention.eval()(*inputs, None, packed_seq_params=rows)
    expected = plain_attention(*inputs, lengths)
    torch.testing.assert_close(own, expected, rtol=0, atol=TOLERANCE)
    own_grads = torch.autograd.grad((own * weights).sum(), inputs)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(own_grads, expected_grads, rtol=0, atol=TOLERANCE)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("num_ranks", "lengths"), [(2, [8, 16, 4, 4]), (4, [8, 24, 16])])
def test_ranks_that_share_sequences_get_the_same(pools, num_ranks, lengths):
    for each in pools(num_ranks).run(context_ranks, lengths=lengths):
        assert each["values"] < TOLERANCE
        assert max(each["gradients"]) < TOLERANCE
        assert each["joined"]


def test_dropout_drops_while_training_alone():
    with cpu_scope():
        config = DecoderConfig(
            num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.5
        )
        attention = PackedAttention(config, 1, None, "self")
        rows = PackedRows.of(edges_of([6]), max_seqlen=6, group=None)
        inputs = [torch.ones(6, 2, 8) for _ in range(3)]
        assert torch.equal(
            attention.eval()(*inputs, None, packed_seq_params=rows), torch.ones(6, 16)
        )


def test_a_sequence_that_does_not_divide_is_refused():
    class TwoRanks:
        """A group of which only size and rank are asked."""

        rank, size = staticmethod(lambda: 0), staticmethod(lambda: 2)

    with pytest.raises(ValueError, match=r"\[8, 6\] tokens.*context_parallel_size=2"):
        PackedRows.of(edges_of([8, 6]), max_seqlen=8, group=TwoRanks)
