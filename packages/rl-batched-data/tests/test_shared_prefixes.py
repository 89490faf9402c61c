from itertools import pairwise

import pytest
import torch
from rl_batched_data.packing.shared_prefixes import _choose_groups, share_prefixes

pytestmark = pytest.mark.promise

# Rows have the same token at a common start alone, so that what is packed can be told apart.
ROWS = [
    [1, 2, 3, 4, 10, 11],
    [1, 2, 3, 4, 12],
    [1, 2, 3, 4, 13, 14, 15],
    [20, 21, 22],
    [5, 6, 7, 30],
    [5, 6, 7, 31, 32, 33],
]


def padded(rows):
    width = max(map(len, rows)) + 1
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return ids, torch.tensor([len(row) for row in rows])


def packed_tokens(shared, ids):
    return shared.packed.pack(ids)[0].tolist()


def test_a_common_start_is_packed_once():
    ids, lengths = padded(ROWS)
    shared = share_prefixes(ids, lengths)
    assert shared is not None
    assert packed_tokens(shared, ids) == [
        *(1, 2, 3, 4),
        *(10, 11),
        *(12,),
        *(13, 14, 15),
        *(20, 21, 22),
        *(5, 6, 7),
        *(30,),
        *(31, 32, 33),
    ]
    # fmt: off
    assert shared.packed.position_ids[0].tolist() == [
        0, 1, 2, 3, 4, 5, 4, 4, 5, 6, 0, 1, 2, 0, 1, 2, 3, 3, 4, 5,
    ]
    # fmt: on


def test_each_token_is_scored_after_the_one_before_it():
    ids, lengths = padded(ROWS)
    shared = share_prefixes(ids, lengths)
    tokens = packed_tokens(shared, ids)
    found = ids.flatten()[shared.targets].tolist()
    pairs = list(zip([tokens[place] for place in shared.predictors.tolist()], found, strict=True))
    expected = {pair for row in ROWS for pair in pairwise(row)}
    # Each once: 4 + 3 tokens of prefixes are not scored again in the rows that share them.
    assert sorted(pairs) == sorted(expected)
    in_rows = shared.scores_to_rows(torch.tensor([found], dtype=torch.float32))
    is_token = torch.arange(ids.shape[1]) < lengths[:, None]
    is_token[:, 0] = False
    assert torch.equal(in_rows, torch.where(is_token, ids, 0).float())


@pytest.mark.parametrize("total_multiple", [1, 8])
@pytest.mark.parametrize("window", [None, 3])
def test_each_token_sees_the_tokens_before_it_in_its_row(total_multiple, window):
    ids, lengths = padded(ROWS)
    shared = share_prefixes(ids, lengths, total_multiple=total_multiple)
    tokens = packed_tokens(shared, ids)
    assert len(tokens) % total_multiple == 0
    seen = [
        (tokens[query], [tokens[key] for key in keys])
        for query, keys in zip(*visible(shared, window), strict=True)
    ]
    for row in ROWS:
        for place, token in enumerate(row):
            first = 0 if window is None else max(0, place + 1 - window)
            assert (token, row[first : place + 1]) in seen
    # No further query, but those of the padding.
    padding = [token for token, _ in seen if token == 0]
    assert len(seen) == 20 + len(padding)


def visible(shared, window):
    """Return each packed token's index, and the indices of the keys that it sees."""
    flat = []
    for chunk in shared.chunks:
        rows, width = chunk.queries.shape
        mask = chunk.mask(window)
        if mask is None:
            # Causal, aligned to the lower right as `attend` aligns it.
            key_width = chunk.keys.shape[1]
            mask = torch.ones(width, key_width).tril(key_width - width).bool()
        mask = mask.expand(rows, 1, width, -1)[:, 0]
        for row in range(rows):
            for query in range(width):
                flat.append((chunk.queries[row, query], chunk.keys[row][mask[row, query]]))
    queries = [int(flat[place][0]) for place in shared.places.tolist()]
    assert queries == list(range(len(queries)))
    return queries, [flat[place][1].tolist() for place in shared.places.tolist()]


def test_gradients_of_all_rows_meet_in_the_prefix():
    ids, lengths = padded(ROWS)
    shared = share_prefixes(ids, lengths)
    values = torch.zeros(1, shared.packed.total_length, requires_grad=True)
    shared.packed.unpack(values).sum().backward()
    counts = [3] * 4 + [1] * 9 + [2] * 3 + [1] * 4
    assert values.grad is not None
    assert values.grad[0].tolist() == counts


@pytest.mark.parametrize(
    ("common", "sizes", "expected"),
    [
        ([9, 9, 1, 7], [10, 12, 11, 8, 9], [(0, 3, 9), (3, 5, 7)]),
        ([9, 3, 9], [10, 10, 10, 10], [(0, 2, 9), (2, 4, 9)]),
        # All in one group save more than two groups do.
        ([9, 8, 9], [10, 10, 10, 10], [(0, 4, 8)]),
        ([1, 1], [20, 20, 20], [(0, 1, 0), (1, 2, 0), (2, 3, 0)]),
        ([], [5], [(0, 1, 0)]),
    ],
)
def test_rows_are_grouped_where_most_is_saved(common, sizes, expected):
    assert [tuple(group) for group in _choose_groups(common, sizes)] == expected


def test_rows_with_little_in_common_are_left_alone():
    ids, lengths = padded([[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 12, 13, 14, 15, 16, 17, 18, 19]])
    assert share_prefixes(ids, lengths) is None


def test_the_same_row_twice_keeps_a_token_of_its_own():
    ids, lengths = padded([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    shared = share_prefixes(ids, lengths)
    assert shared is not None
    assert packed_tokens(shared, ids) == [1, 2, 3, 3, 3]
