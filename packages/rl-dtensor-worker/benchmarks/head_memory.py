"""Measure the memory that training and scoring take: from hidden states, and from all logits."""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from one_rank import FullLogitsLoss, NextTokenLoss, full_rows, start_worker, write_model
from report import Row, parse_options, report

WAYS = {"hidden states": NextTokenLoss, "all logits": FullLogitsLoss}
CALLS = {"train": False, "log-probabilities": True}


def peak_of_call(path: str, way: str, call: str, shape: dict[str, int]) -> float:
    """Return the bytes that a call takes at its peak, above those in use before it."""
    worker = start_worker(path, num_rows=shape["num_rows"], micro_batch_size=shape["num_rows"])
    batch = full_rows(**shape)
    # The optimizer state, and what libraries keep, come with the first call.
    short = full_rows(1, 8, shape["vocab_size"])
    loss_fn = WAYS[way]()
    worker.train(short, loss_fn)
    before = start_watching()
    worker.train(batch, loss_fn, eval_mode=CALLS[call])
    peak = peak_bytes() - before
    worker.shutdown()
    return peak


def start_watching() -> float:
    """Forget the peak so far, and return the bytes in use."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return float(torch.cuda.memory_allocated())
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> float:
    """Return the most bytes in use since `start_watching`."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    return _status("VmHWM")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field + ":")]
    return 1024 * float(line.split()[1])


def main() -> None:
    """Print and write the table; every figure comes from a process of its own."""
    options = parse_options(__doc__)
    width = 128 if options.quick else 512
    shape = {"num_rows": 4, "width": width, "vocab_size": 32768}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as path:
        write_model(path, vocab_size=shape["vocab_size"], hidden_size=256, num_layers=2)
        for call in CALLS:
            peaks: dict[str, float] = {}
            for way in WAYS:
                with ProcessPoolExecutor(
                    1, mp_context=multiprocessing.get_context("spawn")
                ) as pool:
                    peaks[way] = pool.submit(peak_of_call, path, way, call, shape).result()
            rows.append(
                {
                    "call": call,
                    "tokens": shape["num_rows"] * width,
                    "vocabulary": shape["vocab_size"],
                    **{f"{way} MiB": peak / 2**20 for way, peak in peaks.items()},
                    "all logits / hidden states": peaks["all logits"] / peaks["hidden states"],
                }
            )
    report("head_memory", "peak memory of a micro-batch, one rank", rows, options.out)


if __name__ == "__main__":
    main()
