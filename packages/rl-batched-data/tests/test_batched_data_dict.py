import copy
import pickle

import numpy as np
import pytest
import torch
from rl_batched_data import BatchedDataDict, PackedTensor, SlicedDataDict

pytestmark = pytest.mark.promise


def make_batch(num_rows=8, width=3):
    rows = torch.arange(num_rows)
    return BatchedDataDict(
        {
            "ids": rows[:, None] * 10 + torch.arange(width),
            "row": rows,
            "text": [f"row {i}" for i in range(num_rows)],
            "images": PackedTensor(
                [torch.full((i % 3, 2), float(i)) if i % 3 else None for i in range(num_rows)], 0
            ),
        }
    )


def rows_of(batch):
    rows = batch["row"].tolist()
    assert batch["text"] == [f"row {i}" for i in rows]
    assert batch["ids"][:, 0].tolist() == [10 * i for i in rows]
    for row, images in zip(rows, batch["images"].tensors, strict=True):
        assert (images is None) == (row % 3 == 0)
        assert images is None or (images == row).all()
    return rows


def test_size_is_the_number_of_rows_and_0_without_keys():
    assert BatchedDataDict().size == 0
    assert make_batch(5).size == 5


def test_an_entry_that_is_no_tensor_list_or_packed_tensor_is_named():
    with pytest.raises(TypeError, match="'scores' is a ndarray"):
        BatchedDataDict({"scores": np.zeros(3)})


def test_entries_of_different_sizes_are_named_with_their_sizes():
    batch = BatchedDataDict({"a": torch.zeros(4), "b": [1, 2, 3]})
    with pytest.raises(ValueError, match=r"\{'a': 4, 'b': 3\}"):
        batch.shard_by_batch_size(1)


def test_repr_shows_keys_shapes_and_dtypes():
    assert repr(make_batch(2)) == (
        "BatchedDataDict(size=2, ids=int64[2, 3], row=int64[2], text=list[2], "
        "images=PackedTensor[2])"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ids", torch.zeros(8, 3, dtype=torch.int64)),
        ("row", torch.arange(8, dtype=torch.int32)),
        ("text", ["other"] * 8),
        ("images", PackedTensor([None] * 8, 0)),
        ("more", [0] * 8),
    ],
)
def test_equality_sees_values_dtypes_and_keys(key, value):
    left, right = make_batch(), make_batch()
    assert left == right
    right[key] = value
    assert left != right


def test_from_batches_pads_each_key_with_its_own_value():
    narrow = {"ids": torch.tensor([[1, 2]]), "n": torch.tensor([1.0]), "s": ["x"]}
    wide = {"ids": torch.tensor([[3, 4, 5]]), "n": torch.tensor([2.0]), "s": ["y"]}
    joined = BatchedDataDict.from_batches([narrow, wide], {"ids": 9})
    assert joined["ids"].tolist() == [[1, 2, 9], [3, 4, 5]]
    assert joined["n"].tolist() == [1.0, 2.0]
    assert joined["s"] == ["x", "y"]


def test_from_batches_pads_every_axis_but_the_first():
    joined = BatchedDataDict.from_batches([{"x": torch.ones(2, 3, 4)}, {"x": torch.ones(1, 5, 2)}])
    assert joined["x"].shape == (3, 5, 4)
    assert joined["x"].sum() == 2 * 3 * 4 + 5 * 2


def test_from_batches_of_nothing_is_empty():
    assert BatchedDataDict.from_batches([]) == BatchedDataDict()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": torch.zeros(1), "c": [1]}, r"keys \['b', 'c'\]"),
        ({"a": torch.zeros(1)}, r"keys \['b'\]"),
        ({"a": torch.zeros(1).half(), "b": [1]}, "'a' differs in dtype: .*float16.*float32"),
        ({"a": torch.zeros(1, 1), "b": [1]}, "'a' differs in number of axes: 1, 2"),
        ({"a": [0.0], "b": [1]}, "'a' mixes"),
    ],
)
def test_from_batches_names_the_key_that_differs(other, message):
    with pytest.raises(ValueError, match=message):
        BatchedDataDict.from_batches([{"a": torch.zeros(2), "b": [1, 2]}, other])


def test_slice_shares_memory_and_chunk_does_not():
    batch = make_batch()
    part, copied = batch.slice(2, 5), batch.chunk(0, 3)
    assert rows_of(part) == [2, 3, 4]
    assert part["ids"].data_ptr() == batch["ids"][2].data_ptr()
    copied["ids"][0] = -1
    assert rows_of(batch) == list(range(8))


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (0, 9)])
def test_slice_refuses_bounds_outside_the_rows(bounds):
    with pytest.raises(ValueError, match="not within the 8 rows"):
        make_batch().slice(*bounds)


@pytest.mark.parametrize(("num_rows", "chunks"), [(4, 4), (5, 4), (2, 3), (9, 2)])
def test_chunks_cover_every_row_once_and_differ_by_at_most_one(num_rows, chunks):
    parts = [make_batch(num_rows).chunk(rank, chunks) for rank in range(chunks)]
    sizes = [part.size for part in parts]
    assert [row for part in parts for row in rows_of(part)] == list(range(num_rows))
    assert max(sizes) - min(sizes) <= 1


def test_select_indices_takes_lists_and_tensors_in_any_order():
    batch = make_batch()
    assert rows_of(batch.select_indices([5, 0, 5])) == [5, 0, 5]
    assert rows_of(batch.select_indices(torch.tensor([7, 1]))) == [7, 1]
    with pytest.raises(ValueError, match="index 8 is not within the 8 rows"):
        batch.select_indices([8])


def test_repeat_interleave_copies_what_lists_hold():
    batch = BatchedDataDict({"x": torch.tensor([1, 2]), "log": [["a"], ["b"]]})
    repeated = batch.repeat_interleave(2)
    assert repeated["x"].tolist() == [1, 1, 2, 2]
    repeated["log"][0].append("changed")
    assert repeated["log"] == [["a", "changed"], ["a"], ["b"], ["b"]]
    assert batch["log"] == [["a"], ["b"]]
    assert rows_of(make_batch(2).repeat_interleave(3)) == [0, 0, 0, 1, 1, 1]


def test_reorder_data_puts_row_j_at_position_order_j_in_place():
    batch = make_batch(4).select_indices([2, 0, 3, 1])
    assert batch.reorder_data([2, 0, 3, 1]) is batch
    assert rows_of(batch) == [0, 1, 2, 3]


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4]])
def test_reorder_data_refuses_what_is_no_permutation(order):
    with pytest.raises(ValueError, match="not a permutation of the 4 rows"):
        make_batch(4).reorder_data(order)


def test_truncate_tensors_cuts_the_axis_where_there_is_one():
    batch = make_batch()
    batch.truncate_tensors(dim=1, truncated_len=2)
    assert batch["ids"].shape == (8, 2)
    assert batch["row"].shape == (8,)
    with pytest.raises(ValueError, match="axis 0 is the batch"):
        batch.truncate_tensors(dim=0, truncated_len=2)


def test_to_moves_in_place_and_returns_self():
    batch = make_batch()
    assert batch.to("meta") is batch
    assert batch["ids"].device.type == "meta"
    assert batch["images"].tensors[1].device.type == "meta"
    assert batch["text"][0] == "row 0"


def test_writable_shares_no_memory():
    batch = make_batch()
    copied = batch.writable()
    assert copied == batch
    copied["ids"].zero_()
    copied["images"].tensors[1].zero_()
    copied["text"][0] = "changed"
    assert batch == make_batch()


def test_get_dict_is_a_plain_dict_of_the_same_values():
    batch = make_batch()
    assert type(batch.get_dict()) is dict
    assert batch.get_dict()["ids"] is batch["ids"]


def test_micro_batches_cover_the_rows_and_the_last_may_be_short():
    batch = make_batch(5)
    assert [rows_of(part) for part in batch.make_microbatch_iterator(2)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(ValueError, match="micro_batch_size=0 must be at least 1"):
        batch.make_microbatch_iterator(0)


def test_get_batch_takes_rows_by_size_or_by_plan():
    batch = make_batch(5)
    assert rows_of(batch.get_batch(1, 2)) == [2, 3]
    assert rows_of(batch.get_batch(2, 2)) == [4]
    assert rows_of(batch.slice(0, 0).get_batch(0, 2)) == []
    for index, size in ((4, 2), (1, 5), (-1, 2)):
        with pytest.raises(ValueError, match=f"no global batch {index} of {size} rows in 5 rows"):
            batch.get_batch(index, size)
    with pytest.raises(ValueError, match="carries no plan"):
        batch.slice(0, 5).get_batch(0)
    shards = batch.shard_by_batch_size(2, batch_size=3, allow_uneven_shards=True)
    assert [rows_of(shards[0].get_batch(i)) for i in range(2)] == [[0, 1], [3]]
    assert [rows_of(shards[1].get_batch(i)) for i in range(2)] == [[2], [4]]
    with pytest.raises(ValueError, match="no global batch 2: the plan has 2"):
        shards[0].get_batch(2)


@pytest.mark.parametrize(
    ("num_rows", "shards", "batch_size", "expected"),
    [
        (8, 2, 4, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (12, 3, 3, [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]),
        (4, 2, None, [[0, 1], [2, 3]]),
    ],
)
def test_plain_shards_take_a_part_of_every_global_batch(num_rows, shards, batch_size, expected):
    parts = make_batch(num_rows).shard_by_batch_size(shards, batch_size=batch_size)
    assert [rows_of(part) for part in parts] == expected


def test_an_empty_shard_keeps_keys_widths_and_dtypes():
    empty = make_batch(2).shard_by_batch_size(3, allow_uneven_shards=True)[2]
    assert empty.size == 0
    assert list(empty) == ["ids", "row", "text", "images"]
    assert (empty["ids"].shape, empty["ids"].dtype) == ((0, 3), torch.int64)
    assert (empty["text"], len(empty["images"])) == ([], 0)
    assert list(empty.make_microbatch_iterator(2)) == []


def test_a_reordered_shard_has_no_plan():
    shard = make_batch(4).shard_by_batch_size(1, batch_size=2)[0]
    assert shard.elem_counts_per_gb == [2, 2]
    assert shard.reorder_data([1, 0, 2, 3]).elem_counts_per_gb is None


def every_dtype():
    return {
        str(dtype): torch.tensor([[0, 1], [1, 0]]).to(dtype)
        for dtype in (
            torch.bool,
            torch.uint8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.complex64,
            torch.float8_e4m3fn,
        )
    }


def test_a_batch_of_any_dtype_survives_pickling_with_its_plan():
    batch = BatchedDataDict({**every_dtype(), **make_batch(2), "wide": torch.ones(2, 4)[:, ::2]})
    shard = batch.shard_by_batch_size(1)[0]
    loaded = pickle.loads(pickle.dumps(shard, protocol=5))
    assert type(loaded) is SlicedDataDict
    assert loaded == shard
    assert loaded.elem_counts_per_gb == [2]
    empty = batch.slice(1, 1)
    assert pickle.loads(pickle.dumps(empty, protocol=5)) == empty


def test_tensors_travel_out_of_band_and_are_read_without_a_copy():
    batch = make_batch(64)
    buffers = []
    payload = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert {buffer.raw().nbytes for buffer in buffers} >= {64 * 3 * 8, 64 * 8}
    shared = [bytearray(buffer.raw()) for buffer in buffers]
    loaded = pickle.loads(payload, buffers=shared)
    assert loaded == batch
    largest = max(shared, key=len)
    largest[:8] = (77).to_bytes(8, "little")
    assert loaded["ids"][0, 0] == 77


def test_read_only_buffers_are_read_without_a_copy_or_a_warning(recwarn):
    buffers = []
    payload = pickle.dumps(make_batch(64), protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    loaded = pickle.loads(payload, buffers=frozen)
    addresses = {np.frombuffer(raw, dtype=np.uint8).ctypes.data for raw in frozen}
    assert loaded["ids"].data_ptr() in addresses
    assert rows_of(loaded) == list(range(64))
    assert not recwarn.list


def test_a_slice_pickles_its_own_rows_alone():
    batch = BatchedDataDict({"x": torch.zeros(1000, 100)})
    assert len(pickle.dumps(batch.slice(0, 1), protocol=5)) < 2000


def test_a_tensor_with_a_gradient_pickles_as_torch_does_it():
    batch = BatchedDataDict({"x": torch.ones(2, requires_grad=True)})
    assert pickle.loads(pickle.dumps(batch))["x"].requires_grad


def test_deepcopy_shares_no_memory():
    batch = make_batch()
    copied = copy.deepcopy(batch)
    copied["ids"].zero_()
    assert rows_of(batch) == list(range(8))
