import pytest
from rl_batched_data import PackingMetrics, SequenceCost


def test_full_bins_waste_nothing():
    metrics = PackingMetrics.of([[0, 2], [1, 3]], [6, 5, 4, 5], 10)
    assert (metrics.num_sequences, metrics.num_bins, metrics.lower_bound) == (4, 2, 2)
    assert (metrics.utilization, metrics.waste, metrics.imbalance) == (1.0, 0.0, 0.0)


def test_the_lower_bound_counts_tokens_and_sequences_over_half_a_bin():
    assert PackingMetrics.of([[0], [1], [2]], [6, 6, 6], 10).lower_bound == 3
    assert PackingMetrics.of([[0, 1], [2, 3]], [5, 5, 5, 1], 10).lower_bound == 2


def test_imbalance_compares_the_costliest_rank_to_the_mean():
    bins, lengths = [[0], [1], [2], [3]], [8, 2, 4, 6]
    metrics = PackingMetrics.of(bins, lengths, 10, ranks=2)
    assert metrics.imbalance == pytest.approx(12 / 10 - 1)
    squares = SequenceCost(per_token=0, per_token_squared=1)
    metrics = PackingMetrics.of(bins, lengths, 10, ranks=2, cost=squares)
    assert metrics.imbalance == pytest.approx(80 / 60 - 1)
    assert metrics.waste == pytest.approx(0.5)


def test_nothing_is_packed_perfectly():
    metrics = PackingMetrics.of([], [], 10, ranks=4)
    assert (metrics.num_bins, metrics.lower_bound, metrics.waste, metrics.imbalance) == (0, 0, 0, 0)
