"""What crosses Ray: each column once, to a node its ranks' rows; a result as one buffer."""

import pickle

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from rl_batched_data import BatchedDataDict
from rl_policy.ray.objects import (
    BatchStore,
    PackedResult,
    join_results,
    pack_result,
    take_rows,
    unpack_result,
)


def batch(rows=8, width=3):
    ids = torch.arange(rows * width).reshape(rows, width)
    return BatchedDataDict(input_ids=ids, input_lengths=torch.full((rows,), width))


def store(*nodes):
    return BatchStore([frozenset(each.split()) for each in nodes])


def taken(placed):
    """Return what a rank on each node of each coordinate takes."""
    return [
        {
            node: take_rows(rows.plan, rows.sources, ray.get(list(rows.blocks), timeout=PATIENCE_S))
            for node, rows in nodes.items()
        }
        for nodes in placed
    ]


@pytest.fixture(scope="module", autouse=True)
def _started(shared_ray):
    return


@given(
    rows=st.integers(1, 12),
    nodes=st.sampled_from([["a"] * 4, ["a", "a", "b", "b"], ["a", "b", "a", "a b"]]),
    batch_size=st.sampled_from([None, 4, 8]),
)
def test_each_rank_takes_the_rows_of_its_plan(rows, nodes, batch_size):
    data = batch(rows)
    data["text"] = [str(row) for row in range(rows)]
    plans = data.plan_by_batch_size(4, batch_size, allow_uneven_shards=True)
    expected = data.shard_by_batch_size(4, batch_size, allow_uneven_shards=True)
    found = taken(store(*nodes).put(data, plans))
    for coordinate, shard in enumerate(expected):
        assert set(found[coordinate]) == set(nodes[coordinate].split())
        for own in found[coordinate].values():
            assert own == shard
            assert own.elem_counts_per_gb == shard.elem_counts_per_gb


def test_a_node_receives_the_rows_of_its_ranks_alone():
    data = batch(8)
    plans = data.plan_by_batch_size(4, 8)
    placed = store("a", "a", "b", "b").put(data, plans)
    blocks = [
        ray.get(list(nodes[name].blocks), timeout=PATIENCE_S)
        for nodes, name in zip(placed, "aabb", strict=True)
    ]
    assert [block["input_ids"][:, 0].tolist() for (block,) in blocks] == [
        [0, 3, 6, 9],
        [0, 3, 6, 9],
        [12, 15, 18, 21],
        [12, 15, 18, 21],
    ]


def test_plans_with_micro_batches_arrive():
    data = batch(8)
    data["input_lengths"] = torch.tensor([3, 1, 2, 3, 1, 1, 2, 3])
    args = {"max_tokens_per_microbatch": 6}
    plans = data.plan_by_batch_size(2, 8, sequence_packing_args=args)
    expected, _ = data.shard_by_batch_size(2, 8, sequence_packing_args=args)
    for own, shard in zip(taken(store("a", "b").put(data, plans)), expected, strict=True):
        (found,) = own.values()
        assert found == shard
        assert found.micro_batch_indices == shard.micro_batch_indices
        assert found.micro_batch_options == shard.micro_batch_options


def test_a_column_is_put_once_while_batches_are_kept():
    data, own = batch(), store("a", "a")
    plans = data.plan_by_batch_size(2)
    with own.keeping():
        own.put(data, plans)
        assert own.num_puts == 1
        # Another plan of the same rows, as training has after scoring.
        own.put(data, data.plan_by_batch_size(2, 4))
        assert own.num_puts == 1
        data["advantages"] = torch.ones(8)
        ((first,), _) = (nodes.values() for nodes in own.put(data, data.plan_by_batch_size(2, 4)))
        assert own.num_puts == 2
        (new,) = ray.get([first.blocks[1]], timeout=PATIENCE_S)
        assert set(new) == {"advantages"}
    # Nothing is held after it.
    own.put(data, plans)
    assert own.num_puts == 3
    own.put(data, plans)
    assert own.num_puts == 4


def test_a_column_that_changes_is_put_anew():
    data, own = batch(), store("a")
    data["text"] = ["x"] * 8
    plans = data.plan_by_batch_size(1)
    with own.keeping():
        own.put(data, plans)
        data["input_ids"] += 100
        data["text"][0] = "changed"
        (found,) = taken(own.put(data, plans))[0].values()
        assert found == data
        data["input_ids"] = data["input_ids"] + 1
        (found,) = taken(own.put(data, plans))[0].values()
        assert found == data


def test_a_wrong_number_of_plans_is_refused():
    data = batch()
    with pytest.raises(ValueError, match="1 shards do not fit data_parallel=2"):
        store("a", "a").put(data, data.plan_by_batch_size(1))


def test_what_a_call_does_not_have_is_dropped():
    first, other, own = batch(), batch(), store("a")
    plans = first.plan_by_batch_size(1)
    with own.keeping():
        own.put(first, plans)
        own.put(other, plans)
        # No more than one batch is held, so the first is put again.
        own.put(first, plans)
        assert own.num_puts == 3
        own.put(first, plans)
        assert own.num_puts == 3


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


@pytest.mark.parametrize("result", [{}, {"none": None}, {"empty": torch.empty(0, 3)}])
def test_a_result_without_numbers_arrives(result):
    found, _ = sent(result)
    # Which shows the shape of an empty tensor.
    assert str(found) == str(result)


def test_results_of_ranks_are_joined_in_one_buffer():
    scores = BatchedDataDict(logprobs=torch.rand(2, 3), lengths=torch.tensor([1, 2]))
    texts = BatchedDataDict(text=["a"])
    results = {4: scores, 7: pack_result({"lr": [0.5], "norm": torch.ones(1)}), 8: texts, 9: None}
    buffers = []
    packed = pickle.dumps(join_results(results), protocol=5, buffer_callback=buffers.append)
    found = unpack_result(pickle.loads(packed, buffers=buffers))
    assert len(buffers) == 1
    assert list(found) == [4, 7, 8, 9]
    assert found[4] == scores
    assert found[7] == {"lr": [0.5], "norm": torch.ones(1)}
    assert (found[8], found[9]) == (texts, None)


def test_what_has_no_bytes_of_its_own_is_left_as_it_is():
    weight = torch.ones(2, requires_grad=True)
    packed = pack_result({"weight": weight, "mixed": [1.0, 1, True]})
    assert isinstance(packed, PackedResult)
    assert packed.structure == {"weight": weight, "mixed": [1.0, 1, True]}
    batch = BatchedDataDict(logprobs=torch.zeros(2, 3))
    assert pack_result(batch) is batch
    assert unpack_result(batch) is batch
    assert pack_result(None) is None
