import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from rl_refit import digest
from rl_refit.digest import DIGESTS, RunningDigest, keyed_sum_digest, tensor_digest, xxh3_digest

pytestmark = pytest.mark.promise

both = pytest.mark.parametrize("compute", DIGESTS.values(), ids=DIGESTS)
WORDS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=200)


def as_bytes(words):
    return torch.tensor(words, dtype=torch.int32).view(torch.uint8)


@both
@given(WORDS, st.data())
def test_one_flipped_bit_changes_it(compute, words, data):
    original = as_bytes(words)
    flipped = original.clone()
    flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert compute(original, position=0) != compute(flipped, position=0)


@both
@given(st.integers(1, 9), st.integers(2, 9), st.data())
def test_two_swapped_rows_change_it(compute, width, count, data):
    # Also rows that differ in a sign alone, which a sum of 64-bit words could miss.
    value = st.sampled_from([0, 1, -1, -(2**31), 2**31 - 1])
    rows = torch.tensor(
        data.draw(
            st.lists(
                st.lists(value, min_size=width, max_size=width), min_size=count, max_size=count
            )
        ),
        dtype=torch.int32,
    )
    first, second = data.draw(st.permutations(range(count)))[:2]
    swapped = rows.clone()
    swapped[[first, second]] = rows[[second, first]]
    equal = torch.equal(rows, swapped)
    left, right = (compute(t.flatten().view(torch.uint8), position=0) for t in (rows, swapped))
    assert (left == right) == equal


@both
def test_it_depends_on_the_position(compute):
    data = as_bytes(range(64))
    assert compute(data, position=0) != compute(data, position=1)


@both
def test_it_changes_with_the_order_of_pieces(compute, monkeypatch):
    monkeypatch.setattr(digest, "PIECE_WORDS", 16)
    words = torch.randint(-(2**31), 2**31 - 1, (5, 16), dtype=torch.int32)
    swapped = words[[0, 3, 2, 1, 4]]
    left, right = (compute(t.flatten().view(torch.uint8), position=0) for t in (words, swapped))
    assert left != right


def test_the_keyed_sum_is_what_its_formula_says():
    words = torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int32)
    total, state = 0, 0
    for word in words.tolist():
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        key = state
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
        total = (total + word * (key ^ key >> 31 | 1)) % 2**64
    expected = xxhash.xxh3_64_intdigest(np.array([total], dtype=np.uint64).tobytes(), seed=7)
    assert keyed_sum_digest(words.view(torch.uint8), position=7) == expected


@given(st.integers(0, 5000), st.lists(st.integers(0, 5000)))
def test_a_running_digest_is_that_of_the_whole(size, stops):
    data = torch.randint(0, 255, (size,), dtype=torch.uint8)
    running = RunningDigest(data, position=3)
    running.STEP = 100
    for stop in sorted(stops):
        running.advance(min(stop, size))
    assert running.finish() == xxh3_digest(data, position=3)


def test_nothing_has_a_digest_too():
    empty = torch.empty(0, dtype=torch.uint8)
    for compute in DIGESTS.values():
        assert compute(empty, position=0) != compute(empty, position=1)


def test_the_digest_of_a_tensor_is_that_of_its_values():
    tensor = torch.randn(5, 7).bfloat16()
    assert tensor_digest(tensor.T.contiguous().T) == tensor_digest(tensor)
    assert tensor_digest(tensor.T) != tensor_digest(tensor)
