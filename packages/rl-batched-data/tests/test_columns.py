import pytest
import torch
from rl_batched_data import pad_right, round_up, verify_right_padding

pytestmark = pytest.mark.promise

PAD = 9


def batch(rows, lengths):
    return {"input_ids": torch.tensor(rows), "input_lengths": torch.tensor(lengths)}


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (1, 8), (8, 8), (9, 16)])
def test_round_up(value, expected):
    assert round_up(value, 8) == expected


def test_pad_right_fills_the_axis_with_the_value():
    assert pad_right(torch.tensor([[1, 2]]), 4, value=7).tolist() == [[1, 2, 7, 7]]
    assert pad_right(torch.tensor([1]), 2, dim=0).tolist() == [1, 0]
    with pytest.raises(ValueError, match="dim 1 has size 2, longer than length=1"):
        pad_right(torch.tensor([[1, 2]]), 1)


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, 5, 5], [1, 5, 5, 5], [1, 2, 3, 4], [1, 2, 3, 5]],
        [[PAD, 2, 6, 7], [PAD, 0, 0, 0], [PAD, 2, 3, 4], [PAD, 2, PAD, 0]],
    ],
)
def test_padding_is_what_follows_the_length_whatever_its_tokens_are(rows):
    verify_right_padding(batch(rows, [2, 1, 4, 3]))


def test_a_batch_without_rows_is_right_padded():
    verify_right_padding(
        {"input_ids": torch.zeros(0, 4, dtype=torch.int64), "input_lengths": torch.zeros(0)}
    )


def test_an_attention_mask_shows_left_padding():
    data = batch([[1, 2, PAD, PAD], [PAD, PAD, 3, 4]], [2, 2])
    right, left = [1, 1, 0, 0], [0, 0, 1, 1]
    verify_right_padding(data | {"attention_mask": torch.tensor([right, right])})
    with pytest.raises(ValueError, match=r"'attention_mask'\[1\].*'input_lengths'\[1\]=2"):
        verify_right_padding(data | {"attention_mask": torch.tensor([right, left])})
    with pytest.raises(ValueError, match=r"'attention_mask' has shape \[1, 4\]"):
        verify_right_padding(data | {"attention_mask": torch.tensor([right])})


@pytest.mark.parametrize("length", [0, -1, 5])
def test_lengths_outside_the_width_are_named(length):
    data = batch([[1, 2, 3, 4], [1, 2, 3, 4]], [4, length])
    with pytest.raises(ValueError, match=rf"'input_lengths'\[1\]={length} is not within 1..4"):
        verify_right_padding(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"input_ids": torch.zeros(2, 3)}, "'input_lengths' is missing"),
        ({"input_ids": torch.zeros(2), "input_lengths": torch.ones(2)}, r"'input_ids' has shape"),
        (
            {"input_ids": torch.zeros(2, 3), "input_lengths": torch.ones(3)},
            "'input_lengths' has 3 rows, 'input_ids' has 2",
        ),
    ],
)
def test_missing_keys_and_wrong_shapes_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        verify_right_padding(data)
