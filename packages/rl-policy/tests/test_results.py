"""A rank's result as one buffer."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_batched_data import BatchedDataDict
from rl_policy.ray.results import PackedResult, pack_result, unpack_result


def sent(result):
    """Return the result after its way, and how many buffers went beside the pickle."""
    buffers = []
    packed = pickle.dumps(pack_result(result), protocol=5, buffer_callback=buffers.append)
    return unpack_result(pickle.loads(packed, buffers=buffers)), len(buffers)


def test_a_training_result_is_one_buffer():
    result = {
        "global_loss": torch.tensor([1.5, 2.5]),
        "grad_norm": None,
        "rank": 3,
        "all_mb_metrics": {"lr": [0.1, float("inf")], "num_valid_samples": [2, 3], "none": []},
    }
    found, num_buffers = sent(result)
    assert num_buffers == 1
    assert torch.equal(found.pop("global_loss"), result.pop("global_loss"))
    assert found == result
    assert [type(value) for value in found["all_mb_metrics"]["num_valid_samples"]] == [int, int]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_arrive_as_they_are(dtype, shape):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    columns = torch.arange(6.0).reshape(2, 3).T  # not contiguous
    found, _ = sent({"odd": torch.ones(1, dtype=torch.bool), "own": tensor, "columns": columns})
    assert found["own"].dtype == dtype
    assert torch.equal(found["own"], tensor)
    assert torch.equal(found["columns"], columns)


@given(st.lists(st.floats(allow_nan=False)))
def test_lists_of_floats_arrive_bit_for_bit(values):
    found, _ = sent({"values": values})
    assert [value.hex() for value in found["values"]] == [value.hex() for value in values]


def test_what_has_no_bytes_of_its_own_is_left_as_it_is():
    weight = torch.ones(2, requires_grad=True)
    packed = pack_result({"weight": weight, "mixed": [1.0, 1, True]})
    assert isinstance(packed, PackedResult)
    assert packed.structure == {"weight": weight, "mixed": [1.0, 1, True]}
    batch = BatchedDataDict(logprobs=torch.zeros(2, 3))
    assert pack_result(batch) is batch
    assert unpack_result(batch) is batch
    assert pack_result(None) is None
