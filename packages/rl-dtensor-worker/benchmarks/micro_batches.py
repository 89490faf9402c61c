"""Measure one training step and one pass of log-probabilities: padded, dynamic and packed.

Padded micro-batches are cut to their longest row before the model sees them, so that not all of a
batch's padding costs anything. A way's useful share is that of the places that the model does see.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from one_rank import NextTokenLoss, start_worker, write_model
from report import Row, parse_options, report
from rl_batched_data import BatchedDataDict
from rl_dtensor_worker import DTensorPolicyWorker

ROWS, VOCABULARY, RUNS = 64, 1024, 4
WAYS = ("padded", "dynamic_batching", "sequence_packing")


def make_batch(width: int) -> BatchedDataDict[Any]:
    """Return rows of log-normal lengths, of which the median is a fifth of the width."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(ROWS, generator=generator) * 0.8
    lengths = (spread.exp() * width / 5).long().clamp(4, width)
    is_token = torch.arange(width) < lengths[:, None]
    ids = torch.randint(1, VOCABULARY, (ROWS, width), generator=generator)
    return BatchedDataDict(
        input_ids=torch.where(is_token, ids, 0),
        input_lengths=lengths,
        token_mask=(is_token & (torch.arange(width) > 0)).float(),
        sample_mask=torch.ones(ROWS),
    )


def start(model: str, way: str, *, width: int, budget: int) -> tuple[DTensorPolicyWorker, Any]:
    """Return a worker, and the batch with the plan by which it goes through it."""
    batch = make_batch(width)
    budgets = {"train_mb_tokens": budget, "logprob_mb_tokens": budget}
    sections = {} if way == "padded" else {way: {"enabled": True, **budgets}}
    worker = start_worker(model, num_rows=ROWS, micro_batch_size=budget // width, **sections)
    if way == "padded":
        return worker, batch
    arguments = {f"{way}_args": {"max_tokens_per_microbatch": budget}}
    (rows,), _ = batch.shard_by_batch_size(1, batch_size=ROWS, **arguments)
    return worker, rows


def count_places(worker: DTensorPolicyWorker, rows: Any) -> int:
    """Return how many tokens, padding among them, the model sees in a pass over the rows."""
    seen: list[int] = []
    embeddings: Any = worker.model.get_input_embeddings()  # type: ignore[operator]
    hook = embeddings.register_forward_pre_hook(lambda _, given: seen.append(given[0].numel()))
    worker.get_logprobs(rows)
    hook.remove()
    return sum(seen)


def measure(model: str, *, width: int, budget: int) -> list[Row]:
    """Return the fastest of some runs of each way, which take turns."""
    started = {way: start(model, way, width=width, budget=budget) for way in WAYS}
    places = {way: count_places(worker, rows) for way, (worker, rows) in started.items()}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(RUNS):
        for way, (worker, rows) in started.items():
            begin = time.perf_counter()
            worker.train(rows, NextTokenLoss())
            trained = time.perf_counter()
            worker.get_logprobs(rows)
            times[way].append((trained - begin, time.perf_counter() - trained))
    # The first worker owns the process group, so it leaves last.
    for worker, _ in reversed(started.values()):
        worker.shutdown()
    real = float(make_batch(width)["input_lengths"].sum())
    fastest = {
        way: [min(column) for column in zip(*own, strict=True)] for way, own in times.items()
    }
    return [
        {
            "width": width,
            "tokens per micro-batch": budget,
            "way": way,
            "useful %": 100 * real / places[way],
            "train s": train_s,
            "logprobs s": logprobs_s,
            "train, padded / this": fastest["padded"][0] / train_s,
            "logprobs, padded / this": fastest["padded"][1] / logprobs_s,
            # All that there is to gain from the padding that the padded way goes through.
            "of places, padded / this": places["padded"] / places[way],
        }
        for way, (train_s, logprobs_s) in fastest.items()
    ]


def main() -> None:
    """Print and write the table."""
    options = parse_options(__doc__)
    sizes = [(256, 1024)] if options.quick else [(512, 1024), (512, 4096), (1024, 4096)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as model:
        write_model(model, vocab_size=VOCABULARY, hidden_size=256, num_layers=4)
        for width, budget in sizes:
            rows += measure(model, width=width, budget=budget)
    report("micro_batches", f"{ROWS} rows of log-normal lengths, one rank", rows, options.out)


if __name__ == "__main__":
    main()
