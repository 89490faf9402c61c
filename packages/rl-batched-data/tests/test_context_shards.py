"""The plan by which context-parallel ranks shard packed sequences."""

import pytest
import torch
from rl_batched_data import PackedSequences
from rl_batched_data.packing.context_shards import ContextShards


def shards_of(lengths, *, num_ranks):
    multiple = 1 if num_ranks == 1 else 2 * num_ranks
    packed = PackedSequences.of(torch.tensor(lengths), max(lengths), pad_multiple=multiple)
    return [
        ContextShards.of(packed.cu_seqlens, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]


def test_a_rank_has_a_chunk_from_the_front_and_one_from_the_back():
    first, second = shards_of([8, 3], num_ranks=2)
    assert first.own.tolist() == [0, 1, 6, 7, 8, 11]
    assert second.own.tolist() == [2, 3, 4, 5, 9, 10]
    gathered = torch.cat([first.own, second.own])
    assert gathered[first.gathered].tolist() == list(range(12))


def test_one_rank_has_every_sequence_as_one_chunk():
    (only,) = shards_of([5, 3], num_ranks=1)
    assert only.own.tolist() == list(range(8))
    assert [chunk.mask() for chunk in only.chunks] == [None] * len(only.chunks)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_rank_has_the_same_work(num_ranks):
    work = [
        sum(chunk.queries.numel() * chunk.keys.shape[1] for chunk in shards.chunks)
        for shards in shards_of([64, 40, 7, 5], num_ranks=num_ranks)
    ]
    assert max(work) == min(work)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 4])
def test_each_token_sees_its_own_sequence_up_to_itself(num_ranks, window):
    lengths = [24, 17, 1, 9, 16]
    for shards in shards_of(lengths, num_ranks=num_ranks):
        seen = {}
        token_at = torch.empty_like(shards.gathered)
        token_at[shards.gathered] = torch.arange(len(shards.gathered))
        base, rows_of_place = 0, {}
        for chunk in shards.chunks:
            width, key_width = chunk.queries.shape[1], chunk.keys.shape[1]
            mask = chunk.mask(window)
            if mask is None:
                mask = torch.ones(width, key_width, dtype=torch.bool).tril(key_width - width)
            mask = mask.expand(chunk.queries.shape[0], 1, width, key_width)
            for row in range(chunk.queries.shape[0]):
                for column in range(width):
                    rows_of_place[base] = token_at[chunk.keys[row][mask[row, 0, column]]]
                    base += 1
        for token, place in zip(shards.own.tolist(), shards.places.tolist(), strict=True):
            seen[token] = rows_of_place[place].tolist()
        multiple = 1 if num_ranks == 1 else 2 * num_ranks
        starts = torch.tensor([-(-length // multiple) * multiple for length in lengths]).cumsum(0)
        for token, keys in seen.items():
            start = max([0, *(edge for edge in starts.tolist() if edge <= token)])
            first = start if window is None else max(start, token - window + 1)
            assert keys == list(range(first, token + 1))


def test_long_sequences_of_any_length_need_no_mask():
    lengths = [32768, 30000, 32768, 24000, 32, 28]
    for shards in shards_of(lengths, num_ranks=2):
        masks = [chunk.mask() for chunk in shards.chunks]
        assert max(0 if mask is None else mask.numel() for mask in masks) < 1000
        # Those of one length share a call, and so do the short ones.
        rows = [len(chunk.queries) for chunk in shards.chunks]
        assert rows == [2, 2, 1, 1, 1, 1, 2, 2]


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"\[4, 6\] tokens.*4 chunks.*context_parallel_size=2"):
        ContextShards.of(torch.tensor([0, 4, 10]), rank=0, num_ranks=2)
