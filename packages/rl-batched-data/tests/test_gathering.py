import pytest
import torch
from rl_batched_data import BatchedDataDict, PackedTensor


def ragged_batch(rank):
    return BatchedDataDict(
        {
            "ids": torch.full((rank + 1, rank + 2), rank + 1),
            "scores": torch.full((rank + 1,), rank / 2, dtype=torch.bfloat16),
            "flag": torch.tensor([True] * (rank + 1)),
            "text": [f"rank {rank}"] * (rank + 1),
            "images": PackedTensor([torch.ones(rank, 2)] + [None] * rank, 0),
        }
    )


def gathers_every_rank(world_size, rank):
    gathered = ragged_batch(rank).all_gather(pad_value_dict={"ids": -1})
    parts = [ragged_batch(other) for other in range(world_size)]
    assert gathered == BatchedDataDict.from_batches(parts, {"ids": -1})


def gathers_keys_of_any_order(rank):
    keys = ["ids", "scores"] if rank else ["scores", "ids"]
    batch = BatchedDataDict({key: ragged_batch(rank)[key] for key in keys})
    gathered = batch.all_gather(pad_value_dict={"ids": -1})
    parts = [ragged_batch(other).get_dict() for other in range(2)]
    expected = BatchedDataDict.from_batches(
        [BatchedDataDict({key: part[key] for key in keys}) for part in parts], {"ids": -1}
    )
    assert gathered == expected


def names_the_key_that_differs(rank):
    batch = ragged_batch(rank)
    batch["extra" if rank else "other"] = torch.zeros(rank + 1)
    with pytest.raises(ValueError, match=r"\['extra', 'other'\]"):
        batch.all_gather()


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("world_size", [1, 3])
def test_all_gather_returns_the_rows_of_all_ranks(on_gloo_ranks, world_size):
    on_gloo_ranks(world_size, gathers_every_rank, world_size)


def test_ranks_may_have_their_keys_in_different_orders(on_gloo_ranks):
    on_gloo_ranks(2, gathers_keys_of_any_order)


def test_all_gather_names_the_key_that_ranks_differ_in(on_gloo_ranks):
    on_gloo_ranks(2, names_the_key_that_differs)
