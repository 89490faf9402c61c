"""Measure the packers: bins over the lower bound, time and its growth, and rank imbalance."""

from __future__ import annotations

import math
import time

import numpy as np
from report import Row, parse_options, report
from report.packing import PackingMetrics
from rl_batched_data import SequenceCost, get_packer

CAPACITY = 8192
RANKS = 8
ALGORITHMS = (
    "concatenative",
    "first_fit_shuffle",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "cost_balanced",
)
# A decoder of about 1.5 billion parameters.
COST = SequenceCost.from_model(
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=151_936,
)


def log_normal(count: int) -> list[int]:
    """Return lengths with a median of 665 tokens, cut at the capacity."""
    lengths = np.random.default_rng(0).lognormal(6.5, 1.0, count).astype(int)
    return np.clip(lengths, 1, CAPACITY).tolist()


def measure(algorithm: str, lengths: list[int], before: Row | None) -> Row:
    """Return one row of the table."""
    packer = get_packer(algorithm, CAPACITY, bin_count_multiple=RANKS, cost=COST)
    start, used = time.perf_counter(), time.process_time()
    bins = packer.pack(lengths)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - used
    metrics = PackingMetrics.of(bins, lengths, CAPACITY, ranks=RANKS, cost=COST)
    row: Row = {
        "sequences": len(lengths),
        "algorithm": algorithm,
        "bins": metrics.num_bins,
        "lower bound": metrics.lower_bound,
        "over": metrics.num_bins / metrics.lower_bound,
        "waste %": 100 * metrics.waste,
        "imbalance %": 100 * metrics.imbalance,
        "seconds": seconds,
        "cpu seconds": cpu_seconds,
    }
    if before is not None:
        size, old = len(lengths), before["sequences"]
        expected = size * math.log(size) / (old * math.log(old))
        row["growth / (n log n)"] = cpu_seconds / before["cpu seconds"] / expected
    return row


def main() -> None:
    """Print and write the table."""
    options = parse_options(__doc__)
    counts = (1000, 16_384) if options.quick else (1000, 16_384, 65_536, 1_000_000)
    rows: list[Row] = []
    before: dict[str, Row] = {}
    for count in counts:
        lengths = log_normal(count)
        for algorithm in ALGORITHMS:
            before[algorithm] = measure(algorithm, lengths, before.get(algorithm))
            rows.append(before[algorithm])
    title = f"Packers, log-normal lengths, capacity {CAPACITY}, {RANKS} ranks"
    report("packers", title, rows, options.out)


if __name__ == "__main__":
    main()
