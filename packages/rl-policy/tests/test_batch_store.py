"""What goes into the object store: each column once, and to each node the rows of its ranks."""

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_batched_data import BatchedDataDict
from rl_policy.ray.batch_store import BatchStore, take_rows


def batch(rows=8, width=3):
    ids = torch.arange(rows * width).reshape(rows, width)
    return BatchedDataDict(input_ids=ids, input_lengths=torch.full((rows,), width))


def store(*nodes):
    return BatchStore([frozenset(each.split()) for each in nodes])


def taken(placed):
    """Return what a rank on each node of each coordinate takes."""
    return [
        {
            node: take_rows(rows.plan, rows.sources, ray.get(list(rows.blocks), timeout=30))
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
        ray.get(list(nodes[name].blocks), timeout=30)
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
        (new,) = ray.get([first.blocks[1]], timeout=30)
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
