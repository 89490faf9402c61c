from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_batched_data import PackedSequences


def test_the_worked_example():
    layout = PackedSequences.of(torch.tensor([3, 2]), 3, pad_multiple=4, total_length=12)
    rows = torch.tensor([[11, 12, 13], [21, 22, 0]])
    assert layout.pack(rows).tolist() == [[11, 12, 13, 0, 21, 22, 0, 0, 0, 0, 0, 0]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3] * 3]
    assert layout.cu_seqlens.tolist() == [0, 4, 8, 12]
    assert layout.cu_seqlens.dtype == torch.int32
    assert (layout.max_seqlen, layout.total_length) == (4, 12)


@settings(max_examples=500, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), max_size=8),
    extra=st.integers(0, 3),
    multiple=st.integers(1, 5),
    tail=st.integers(0, 6),
)
@pytest.mark.promise
def test_packing_and_unpacking_returns_the_rows(lengths, extra, multiple, tail):
    width = max(lengths, default=0) + extra
    needed = sum(-(-length // multiple) * multiple for length in lengths)
    layout = PackedSequences.of(
        torch.tensor(lengths, dtype=torch.int64),
        width,
        pad_multiple=multiple,
        total_length=needed + tail,
    )
    values = torch.rand(len(lengths), width, 2)
    mask = torch.arange(width) < torch.tensor(lengths, dtype=torch.int64)[:, None]
    packed = layout.pack(values, pad_value=-1)
    assert packed.shape == (1, needed + tail, 2)
    assert (packed == -1).all(dim=2).sum() == needed + tail - sum(lengths)
    assert torch.equal(layout.unpack(packed), values * mask[..., None])
    starts = layout.cu_seqlens.tolist()
    expected = [i - low for low, high in pairwise(starts) for i in range(low, high)]
    assert layout.position_ids[0].tolist() == expected
    assert starts[-1] == needed + tail


def test_gradients_flow_back_to_the_concatenation():
    layout = PackedSequences.of(torch.tensor([2, 3]), 4, pad_multiple=2)
    values = torch.rand(1, layout.total_length, requires_grad=True)
    weights = torch.arange(8.0).view(2, 4)
    (layout.unpack(values, skip_first=True) * weights).sum().backward()
    assert values.grad.tolist() == [[0, 1, 0, 5, 6, 0]]


def test_rows_without_tokens_leave_a_gradient_of_zero():
    layout = PackedSequences.of(torch.empty(0, dtype=torch.int64), 4, total_length=8)
    values = torch.rand(1, 8, requires_grad=True)
    rows = layout.unpack(values)
    assert rows.shape == (0, 4)
    rows.sum().backward()
    assert (values.grad == 0).all()
    assert layout.cu_seqlens.tolist() == [0, 8]


def test_skip_first_leaves_the_first_position_to_the_padding_value():
    layout = PackedSequences.of(torch.tensor([2, 1]), 2)
    rows = layout.unpack(torch.tensor([[1.0, 2.0, 3.0]]), skip_first=True, pad_value=9)
    assert rows.tolist() == [[9, 2], [9, 9]]


@pytest.mark.parametrize(("width", "total"), [(3, 4), (2, None)])
def test_sequences_that_do_not_fit_are_named(width, total):
    with pytest.raises(ValueError, match=f"total_length={total or 5} and width={width}"):
        PackedSequences.of(torch.tensor([3, 2]), width, total_length=total)
