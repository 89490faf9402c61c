import pytest
import torch
from rl_batched_data import PackedTensor


def test_rows_are_concatenated_along_the_packing_axis():
    packed = PackedTensor([torch.ones(2, 3), None, torch.zeros(1, 3)], dim_to_pack=0)
    assert len(packed) == 3
    assert packed.as_tensor().tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert packed.as_tensor("meta").device.type == "meta"
    assert packed.tensors[0].device.type == "cpu"


def test_a_single_tensor_is_one_row():
    assert len(PackedTensor(torch.ones(4, 2), dim_to_pack=0)) == 1


def test_no_tensor_at_all_is_none():
    empty = PackedTensor.empty_like(PackedTensor([torch.ones(1), None], 0))
    assert len(empty) == 2
    assert empty.as_tensor() is None


def test_concat_needs_one_packing_axis():
    left, right = PackedTensor([torch.ones(1, 2)], 0), PackedTensor([None], 0)
    assert len(PackedTensor.concat([left, right])) == 2
    with pytest.raises(ValueError, match=r"dim_to_pack, got \[0, 1\]"):
        PackedTensor.concat([left, PackedTensor([None], 1)])


def test_equality_sees_values_dtype_absence_and_axis():
    packed = PackedTensor([torch.ones(2), None], 0)
    assert packed == PackedTensor([torch.ones(2), None], 0)
    for rows, dim in (
        ([torch.ones(2).double(), None], 0),
        ([torch.zeros(2), None], 0),
        ([torch.ones(2), torch.ones(2)], 0),
        ([torch.ones(2)], 0),
        ([torch.ones(2), None], 1),
    ):
        assert packed != PackedTensor(rows, dim)


def test_repr_shows_shapes():
    assert repr(PackedTensor([torch.ones(2, 3), None], 0)) == (
        "PackedTensor([[2, 3], None], dim_to_pack=0)"
    )
