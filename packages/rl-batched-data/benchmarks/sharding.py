"""Measure sharding and packing a batch: the plan and its gather, and packing the tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from report import Row, parse_options, report
from rl_batched_data import BatchedDataDict

SHARDS = 8


def make_batch(rows: int, width: int) -> BatchedDataDict[Any]:
    """Return a batch of two int64 and two float32 matrices, lengths log-normal."""
    torch.manual_seed(0)
    lengths = torch.empty(rows).log_normal_(6.5, 1.0).long().clamp(1, width)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(1, 1000, (rows, width)),
            "input_lengths": lengths,
            "token_mask": torch.ones(rows, width, dtype=torch.int64),
            "logprobs": torch.zeros(rows, width),
            "advantages": torch.zeros(rows, width),
            "text": [f"row {i}" for i in range(rows)],
        }
    )


def measure(what: str, call: Callable[[], object], runs: int = 3) -> Row:
    """Return the times of the fastest of some runs, on the clock and of the processors."""
    times: list[tuple[float, float]] = []
    for _ in range(runs):
        start, used = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - start, time.process_time() - used))
    seconds, cpu_seconds = min(times)
    return {"what": what, "seconds": seconds, "cpu seconds": cpu_seconds}


def pack_all(shards: list[Any]) -> None:
    """Concatenate every matrix of every planned micro-batch, and put one of them back."""
    for shard in shards:
        for micro_batch in shard.make_microbatch_iterator_for_packable_sequences():
            layout = micro_batch.packed_sequences()
            for key in ("input_ids", "token_mask", "logprobs", "advantages"):
                packed = layout.pack(micro_batch[key])
            layout.unpack(packed)


def main() -> None:
    """Print and write the table."""
    options = parse_options(__doc__)
    size = 1024 if options.quick else 4096
    batch = make_batch(size, size)
    tokens = int(batch["input_lengths"].sum())
    budget = {"max_tokens_per_microbatch": 2 * size}
    packing = {**budget, "algorithm": "cost_balanced"}
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: batch.shard_by_batch_size(SHARDS),
        "plain, global batches": lambda: batch.shard_by_batch_size(SHARDS, batch_size=size // 4),
        "dynamic": lambda: batch.shard_by_batch_size(SHARDS, dynamic_batching_args=budget),
        "packed": lambda: batch.shard_by_batch_size(SHARDS, sequence_packing_args=packing),
    }
    rows = [measure(f"shard: {way}", call) for way, call in ways.items()]
    shards, order = ways["packed"]()
    gathered = BatchedDataDict.from_batches(shards)
    rows.append(measure("reorder", lambda: gathered.reorder_data(order)))
    rows.append(measure("concatenate", lambda: pack_all(shards)))
    num_bytes = sum(v.nbytes for v in batch.values() if isinstance(v, torch.Tensor))
    title = f"{size} x {size}, {num_bytes / 2**20:.0f} MiB, {tokens} tokens, {SHARDS} shards"
    report("sharding", title, rows, options.out)


if __name__ == "__main__":
    main()
