import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_batched_data import SequenceCost, get_packer

ALGORITHMS = [
    "concatenative",
    "cost_balanced",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
]
EXAMPLE = [46, 24, 55, 88, 11, 14, 73, 17]

many = settings(max_examples=1000, deadline=None)


@st.composite
def sequences(draw, max_size=60):
    capacity = draw(st.integers(1, 200))
    return draw(st.lists(st.integers(1, capacity), max_size=max_size)), capacity


@st.composite
def full_bins(draw):
    """Return the lengths that some bins of the capacity were cut into: the optimum is known."""
    capacity = draw(st.integers(4, 120))
    num_bins = draw(st.integers(1, 25))
    lengths = []
    for _ in range(num_bins):
        cuts = sorted(draw(st.sets(st.integers(1, capacity - 1), max_size=6)))
        lengths += [high - low for low, high in zip([0, *cuts], [*cuts, capacity], strict=True)]
    order = draw(st.randoms(use_true_random=False))
    order.shuffle(lengths)
    return lengths, capacity, num_bins


def fewest_bins(lengths, capacity):
    """Return the optimum, by trying every subset of what is left as the next bin's content."""
    subsets = [mask for mask in range(1, 1 << len(lengths)) if total(lengths, mask) <= capacity]

    @functools.cache
    def solve(left):
        if not left:
            return 0
        lowest = left & -left
        return 1 + min(
            solve(left & ~mask) for mask in subsets if mask & lowest and not mask & ~left
        )

    return solve((1 << len(lengths)) - 1)


def total(lengths, mask):
    return sum(length for i, length in enumerate(lengths) if mask >> i & 1)


def naive_first_fit(lengths, order, capacity):
    bins, room = [], []
    for index in order:
        fitting = (number for number, left in enumerate(room) if left >= lengths[index])
        number = next(fitting, None)
        if number is None:
            number = len(bins)
            bins.append([])
            room.append(capacity)
        bins[number].append(index)
        room[number] -= lengths[index]
    return bins


def naive_modified(lengths, capacity):
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins = [[i] for i in left if lengths[i] * 2 > capacity]
    left = [i for i in left if lengths[i] * 2 <= capacity]

    def room(content):
        return capacity - sum(lengths[i] for i in content)

    def put(content, candidates):
        index = next((i for i in candidates if lengths[i] <= room(content)), None)
        if index is not None:
            content.append(index)
            left.remove(index)
        return index

    for content in bins:
        put(content, [i for i in left if lengths[i] * 3 > capacity])
    for content in reversed(bins):
        small = [i for i in left if capacity < lengths[i] * 6 <= capacity * 2]
        if (
            len(content) == 1
            and len(small) > 1
            and sum(lengths[i] for i in small[-2:]) <= room(content)
        ):
            put(content, small[-1:])
            put(content, small[:-1])
    for content in bins:
        while put(content, list(left)) is not None:
            pass
    return bins + [
        [left[i] for i in content]
        for content in naive_first_fit([lengths[i] for i in left], range(len(left)), capacity)
    ]


def check(bins, lengths, capacity):
    assert sorted(index for content in bins for index in content) == list(range(len(lengths)))
    assert all(bins)
    assert all(sum(lengths[i] for i in content) <= capacity for content in bins)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@many
@given(case=sequences())
def test_every_sequence_is_in_one_bin_and_no_bin_is_over_capacity(algorithm, case):
    lengths, capacity = case
    check(get_packer(algorithm, capacity).pack(lengths), lengths, capacity)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@many
@given(case=sequences(max_size=30), fewest=st.integers(1, 10), multiple=st.integers(1, 6))
def test_bin_counts_are_reached_without_an_empty_bin(algorithm, case, fewest, multiple):
    lengths, capacity = case
    natural = len(get_packer(algorithm, capacity).pack(lengths))
    packer = get_packer(algorithm, capacity, min_bin_count=fewest, bin_count_multiple=multiple)
    wanted = -(-max(natural, fewest) // multiple) * multiple
    if lengths and len(lengths) < wanted and algorithm != "cost_balanced":
        with pytest.raises(ValueError, match=f"{len(lengths)} sequences cannot fill {wanted} bins"):
            packer.pack(lengths)
    elif len(lengths) >= wanted or not lengths:
        bins = packer.pack(lengths)
        check(bins, lengths, capacity)
        assert len(bins) % multiple == 0
        assert len(bins) >= fewest or not lengths


@many
@given(case=sequences())
def test_first_fit_decreasing_is_the_naive_one(case):
    lengths, capacity = case
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    expected = naive_first_fit(lengths, order, capacity)
    assert get_packer("first_fit_decreasing", capacity).pack(lengths) == expected


@many
@given(case=sequences())
def test_modified_first_fit_decreasing_is_the_naive_one(case):
    lengths, capacity = case
    expected = naive_modified(lengths, capacity)
    assert get_packer("modified_first_fit_decreasing", capacity).pack(lengths) == expected


def check_bounds(lengths, capacity, fewest):
    """The proven bounds: Dosa 2007 for the first, Johnson and Garey 1985 for the second."""
    decreasing = len(get_packer("first_fit_decreasing", capacity).pack(lengths))
    modified = len(get_packer("modified_first_fit_decreasing", capacity).pack(lengths))
    balanced = len(get_packer("cost_balanced", capacity).pack(lengths))
    assert fewest <= decreasing <= 11 / 9 * fewest + 6 / 9
    assert fewest <= modified <= 71 / 60 * fewest + 1
    assert balanced == decreasing


@settings(max_examples=300, deadline=None)
@given(case=sequences(max_size=8))
def test_bins_are_within_the_proven_bounds_of_the_optimum(case):
    lengths, capacity = case
    check_bounds(lengths, capacity, fewest_bins(lengths, capacity) if lengths else 0)


@many
@given(case=full_bins())
def test_bins_are_within_the_proven_bounds_of_full_bins(case):
    check_bounds(*case)


def test_modified_first_fit_decreasing_on_the_worked_example():
    packer = get_packer("modified_first_fit_decreasing", 100)
    assert packer.pack(EXAMPLE) == [[3, 4], [6, 5], [2, 7, 1], [0]]


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(5, [[0, 1], [2, 3], [4, 5], [6], [7]]), (8, [[0, 1, 2], [3, 4, 5], [6], [7]])],
)
def test_concatenative_keeps_the_order(capacity, expected):
    assert get_packer("concatenative", capacity).pack([4, 1, 3, 2, 1, 3, 4, 5]) == expected


def test_first_fit_shuffle_is_fixed_by_its_seed():
    lengths = list(range(1, 60))
    packed = [get_packer("first_fit_shuffle", 64, seed=seed).pack(lengths) for seed in (1, 1, 2)]
    assert packed[0] == packed[1] != packed[2]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_sequences_make_no_bins(algorithm):
    assert get_packer(algorithm, 10, min_bin_count=2).pack([]) == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("length", [150, 0, -3])
def test_a_length_outside_the_capacity_is_named(algorithm, length):
    message = f"sequence 1 has {length} tokens, which is not within 1..100"
    with pytest.raises(ValueError, match=message):
        get_packer(algorithm, 100).pack([50, length])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "best_fit"}, "algorithm='best_fit' is none of concatenative, cost_balanced"),
        ({"bin_capacity": 0}, "bin_capacity=0 must be at least 1"),
        ({"min_bin_count": 0}, "min_bin_count=0 must be at least 1"),
        ({"bin_count_multiple": -1}, "bin_count_multiple=-1 must be at least 1"),
    ],
)
def test_wrong_options_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_packer(**{"algorithm": "concatenative", "bin_capacity": 8, **arguments})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_empty_bins_make_up_for_missing_sequences_when_allowed(algorithm):
    packer = get_packer(algorithm, 10, bin_count_multiple=4, allow_empty_bins=True)
    bins = packer.pack([9, 8])
    assert sorted(bins) == [[], [], [0], [1]]
    with pytest.raises(ValueError, match="2 sequences cannot fill 4 bins"):
        get_packer(algorithm, 10, bin_count_multiple=4).pack([9, 8])


def log_normal(count, seed=0):
    draw = random.Random(seed)
    return [min(8192, max(1, int(draw.lognormvariate(6.5, 1.0)))) for _ in range(count)]


def imbalance(bins, lengths, ranks, cost):
    """Return the cost of the costliest rank over the mean, minus 1; bin k is rank k % ranks."""
    costs = [
        sum(cost.of(lengths[i]) for b in bins[rank::ranks] for i in b) for rank in range(ranks)
    ]
    return max(costs) * ranks / sum(costs) - 1


@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("count", [1000, 16_384])
def test_cost_balanced_ranks_are_within_a_tenth_of_a_percent_in_no_more_bins(ranks, count):
    lengths = log_normal(count)
    cost = SequenceCost(per_token=1.0, per_token_squared=1 / 4096)
    bins = get_packer("cost_balanced", 8192, bin_count_multiple=ranks, cost=cost).pack(lengths)
    check(bins, lengths, 8192)
    plain = get_packer("first_fit_decreasing", 8192, bin_count_multiple=ranks).pack(lengths)
    assert len(bins) == len(plain)
    assert imbalance(bins, lengths, ranks, cost) < 0.001 < imbalance(plain, lengths, ranks, cost)


def test_ranks_run_alike_bins_at_the_same_time():
    lengths = log_normal(4000)
    bins = get_packer("cost_balanced", 8192, bin_count_multiple=4).pack(lengths)
    sums = [sum(lengths[i] for i in content) for content in bins]
    steps = [sums[start : start + 4] for start in range(0, len(sums), 4)]
    assert sum(max(step) for step in steps) < 1.01 * sum(sums) / 4
