import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_batched_data import BatchedDataDict, PackedTensor

DYNAMIC = {
    "max_tokens_per_microbatch": 64,
    "sequence_length_round": 4,
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
}
PACKED = {
    "algorithm": "modified_first_fit_decreasing",
    "max_tokens_per_microbatch": 64,
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
    "sequence_length_pad_multiple": 4,
}
WAYS = [
    {"dynamic_batching_args": DYNAMIC},
    {"sequence_packing_args": PACKED},
    {"sequence_packing_args": {**PACKED, "algorithm": "cost_balanced"}},
]

batches = st.lists(st.integers(1, 30), max_size=24).map(lambda lengths: make_batch(lengths))


def make_batch(lengths, width=30):
    """Return a batch whose padding is 0, as are the rows of `score` beyond each length."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    row = torch.arange(len(lengths))
    is_token = torch.arange(width) < sizes[:, None]
    return BatchedDataDict(
        {
            "input_ids": (row[:, None] * 100 + torch.arange(width) + 1) * is_token,
            "input_lengths": sizes,
            "score": torch.rand(len(lengths), width, 2) * is_token[..., None],
            "embedding": torch.rand(len(lengths), 5),
            "text": [f"row {i}" for i in range(len(lengths))],
            "images": PackedTensor(
                [torch.full((1, 2), float(i)) if i % 2 else None for i in range(len(lengths))], 0
            ),
        }
    )


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=150, deadline=None)
@given(batch=batches, shards=st.integers(1, 4), batch_size=st.none() | st.integers(1, 9))
@pytest.mark.promise
def test_reorder_data_restores_what_any_way_of_sharding_has_mixed(way, batch, shards, batch_size):
    before = batch.writable()
    parts, order = batch.shard_by_batch_size(shards, batch_size=batch_size, **way)
    assert batch == before
    assert BatchedDataDict.from_batches(parts).reorder_data(order) == before


@settings(max_examples=150, deadline=None)
@given(batch=batches, shards=st.integers(1, 4), batch_size=st.none() | st.integers(1, 9))
@pytest.mark.promise
def test_dynamic_micro_batches_hold_every_token_at_their_planned_shape(batch, shards, batch_size):
    parts, order = batch.shard_by_batch_size(
        shards, batch_size=batch_size, dynamic_batching_args=DYNAMIC
    )
    seen = []
    for part in parts:
        widths = [width for widths in part.micro_batch_lengths for width in widths]
        micro_batches = list(part.make_microbatch_iterator_with_dynamic_shapes())
        assert [micro["input_ids"].shape[1] for micro in micro_batches] == widths
        assert all(micro["embedding"].shape[1] == 5 for micro in micro_batches)
        assert all(micro["input_ids"].numel() <= 64 for micro in micro_batches)
        seen += micro_batches
    if seen:
        together = BatchedDataDict.from_batches(seen)
        together = together.reorder_data(order)
        width = together["input_ids"].shape[1]
        expected = BatchedDataDict.from_batches([batch.slice(0, batch.size)])
        assert together["text"] == expected["text"]
        for key in ("input_ids", "score"):
            shared = min(width, 30)
            assert torch.equal(together[key][:, :shared], expected[key][:, :shared])
            assert not expected[key][:, shared:].any()


@settings(max_examples=150, deadline=None)
@given(batch=batches, shards=st.integers(1, 4), batch_size=st.none() | st.integers(1, 9))
@pytest.mark.promise
def test_packed_micro_batches_unpack_to_the_rows(batch, shards, batch_size):
    parts, order = batch.shard_by_batch_size(
        shards, batch_size=batch_size, sequence_packing_args=PACKED
    )
    unpacked = []
    for part in parts:
        lengths = [length for lengths in part.micro_batch_lengths for length in lengths]
        for micro, length in zip(
            part.make_microbatch_iterator_for_packable_sequences(), lengths, strict=True
        ):
            layout = micro.packed_sequences()
            tokens = layout.pack(micro["input_ids"])
            assert tokens.shape == (1, length)
            unpacked.append(
                {
                    "input_ids": layout.unpack(tokens),
                    "score": layout.unpack(layout.pack(micro["score"])),
                }
            )
    if unpacked:
        together = BatchedDataDict.from_batches(unpacked).reorder_data(order)
        assert torch.equal(together["input_ids"], batch["input_ids"])
        assert torch.equal(together["score"], batch["score"])


def test_a_shard_and_its_global_batches_keep_the_plan_through_pickling():
    parts, _ = make_batch([9] * 8).shard_by_batch_size(
        2, batch_size=4, sequence_packing_args=PACKED
    )
    loaded = pickle.loads(pickle.dumps(parts[1], protocol=5))
    assert loaded == parts[1]
    assert loaded.micro_batch_indices == parts[1].micro_batch_indices
    second = loaded.get_batch(1, batch_size=2)
    assert second == parts[1].slice(2, 4)
    assert second.micro_batch_lengths == [parts[1].micro_batch_lengths[1]]
    texts = [
        text
        for micro in second.make_microbatch_iterator_for_packable_sequences()
        for text in micro["text"]
    ]
    assert texts == second["text"]


def groups_of(batch):
    return [int(text.split()[1]) // 3 for text in batch["text"]]


@pytest.mark.parametrize(
    "way",
    [
        {"allow_uneven_shards": True},
        {"dynamic_batching_args": DYNAMIC},
        {"sequence_packing_args": PACKED},
    ],
)
@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 16), min_size=3, max_size=36), shards=st.integers(1, 4))
def test_groups_of_rows_stay_on_one_shard_and_in_one_micro_batch(way, lengths, shards):
    lengths = lengths[: len(lengths) // 3 * 3]
    sharded = make_batch(lengths).shard_by_batch_size(shards, rows_per_group=3, **way)
    parts = sharded if isinstance(sharded, list) else sharded[0]
    seen = []
    for part in parts:
        if "dynamic_batching_args" in way:
            pieces = list(part.make_microbatch_iterator_with_dynamic_shapes())
        elif "sequence_packing_args" in way:
            pieces = list(part.make_microbatch_iterator_for_packable_sequences())
        else:
            pieces = list(part.make_microbatch_iterator(3))
        for piece in pieces:
            groups = groups_of(piece)
            assert all(groups.count(group) == 3 for group in groups)
            seen += groups[::3]
    assert sorted(seen) == list(range(len(lengths) // 3))


def test_a_contiguous_shard_is_a_view():
    batch = make_batch([5] * 4)
    part = batch.shard_by_batch_size(2)[1]
    assert part["input_ids"].data_ptr() == batch["input_ids"][2].data_ptr()


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        (
            {},
            {"dynamic_batching_args": DYNAMIC, "sequence_packing_args": PACKED},
            "dynamic_batching_args and sequence_packing_args exclude each other",
        ),
        (
            {},
            {"dynamic_batching_args": {"max_tokens": 3}},
            r"dynamic_batching_args has unknown keys \['max_tokens'\]; it takes \['input_key'",
        ),
        (
            {},
            {"sequence_packing_args": {}},
            "sequence_packing_args lacks the key 'max_tokens_per_microbatch'",
        ),
        (
            {},
            {"sequence_packing_args": {**PACKED, "input_lengths_key": "sizes"}},
            "'sizes' is missing; the batch has",
        ),
        ({}, {"dynamic_batching_args": {**DYNAMIC, "input_key": "ids"}}, "'ids' is missing"),
        (
            {},
            {"dynamic_batching_args": {**DYNAMIC, "input_key": "text"}},
            "'text' must be a tensor with at least 2 axes",
        ),
        (
            {"input_lengths": torch.tensor([4, 0, 4, 4])},
            {"dynamic_batching_args": DYNAMIC},
            r"'input_lengths'\[1\]=0 must be within 1..30, the width of 'input_ids'",
        ),
        (
            {"input_lengths": torch.tensor([4, 4, -2, 4])},
            {"dynamic_batching_args": DYNAMIC},
            r"'input_lengths'\[2\]=-2 must be within 1..30",
        ),
        (
            {"input_lengths": torch.tensor([4, 4, 31, 4])},
            {"sequence_packing_args": PACKED},
            r"'input_lengths'\[2\]=31 must be within 1..30",
        ),
        (
            {"text": ["a"]},
            {"sequence_packing_args": PACKED},
            r"differ in their number of rows: .*'text': 1",
        ),
        ({}, {"rows_per_group": 3}, "rows=4 is not a multiple of rows_per_group=3"),
        ({}, {"rows_per_group": 2, "batch_size": 1}, "batch_size=1 is not a multiple of rows_per"),
        ({}, {"rows_per_group": 0}, "rows_per_group=0 must be at least 1"),
    ],
)
def test_wrong_arguments_are_named_before_any_tensor_is_touched(changes, arguments, message):
    batch = make_batch([4] * 4)
    batch.update(changes)
    if "input_lengths" not in changes:
        batch["score"] = batch["score"].to("meta")
    with pytest.raises(ValueError, match=message):
        batch.shard_by_batch_size(2, **arguments)


def test_a_batch_without_the_plan_has_no_such_micro_batches():
    batch = make_batch([4] * 4).slice(0, 4)
    with pytest.raises(ValueError, match="no plan of dynamic micro-batches"):
        batch.make_microbatch_iterator_with_dynamic_shapes()
    with pytest.raises(ValueError, match="no plan of packed micro-batches"):
        batch.make_microbatch_iterator_for_packable_sequences()
    with pytest.raises(ValueError, match="not one packed micro-batch"):
        batch.packed_sequences()
