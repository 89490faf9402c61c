"""Measure the peak memory of `train` on a GPU against what the fake device counts beforehand.

The fake device (`rl_interfaces.testing.fake_cuda`) needs a build of torch without CUDA, so its
counts are kept in `peak_bytes.json`, which `--predict` writes. On a GPU the same settings run, and
are compared with the file. Without one the counts are made anew: a ratio other than 1 then says
that the file is old. A build with CUDA on a machine without a GPU can do neither, and says so.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from one_rank import NextTokenLoss, full_rows, start_worker, write_model
from report import Row, option_parser, report
from rl_batched_data import BatchedDataDict
from rl_interfaces.testing.fake_cuda import fake_cuda, run_on_fake_cuda, why_unavailable

PREDICTED = Path(__file__).with_suffix(".json")
SIZES = {"vocab_size": 32_768, "hidden_size": 1024, "num_layers": 8}
NUM_ROWS, MICRO_BATCH, WIDTH = 4, 2, 1024
_BUDGET = MICRO_BATCH * WIDTH
_PACKING = {"enabled": True, "train_mb_tokens": _BUDGET, "logprob_mb_tokens": _BUDGET}
SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"precision": "float32"},
    "packed": {"sequence_packing": _PACKING},
    "checkpointing": {"dtensor_cfg": {"enabled": True, "activation_checkpointing": True}},
    "LoRA": {"dtensor_cfg": {"enabled": True, "lora": {"enabled": True, "r": 16}}},
}


def rows_of(setting: str) -> BatchedDataDict[Any]:
    """Return the rows of a `train` call, planned as the setting asks for."""
    batch = full_rows(NUM_ROWS, WIDTH, SIZES["vocab_size"])
    if setting != "packed":
        return batch
    (plan,) = batch.plan_by_batch_size(
        1,
        batch_size=NUM_ROWS,
        sequence_packing_args={
            "max_tokens_per_microbatch": _BUDGET,
            "algorithm": "modified_first_fit_decreasing",
            "sequence_length_pad_multiple": 1,
        },
    )
    return batch.apply_plan(plan)


def peak_of_train(model: str, setting: str) -> int:
    """Return the most bytes in use in a second call, which finds the optimizer's state there."""
    overrides = {"precision": "bfloat16"} | SETTINGS[setting]
    worker = start_worker(model, num_rows=NUM_ROWS, micro_batch_size=MICRO_BATCH, **overrides)
    batch, loss = rows_of(setting), NextTokenLoss()
    worker.train(batch, loss)
    torch.cuda.reset_peak_memory_stats()
    worker.train(batch, loss)
    peak = torch.cuda.max_memory_allocated()
    worker.shutdown()
    return peak


def predicted_peak(model: str, setting: str) -> int:
    """Return what the fake device counts; runs in a process that has loaded it."""
    with fake_cuda(world_size=1):
        return peak_of_train(model, setting)


def predict(model: str, setting: str) -> int:
    """Return what the fake device counts."""
    arguments = {"model": model, "setting": setting}
    return run_on_fake_cuda("peak_bytes:predicted_peak", path=[PREDICTED.parent], **arguments)


def measure(model: str, setting: str) -> int:
    """Return what a process of its own takes on the GPU."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(peak_of_train, model, setting).result()


def main() -> None:
    """Print and write the table, or the counts beforehand."""
    parser = option_parser(__doc__)
    parser.add_argument("--predict", action="store_true", help=f"write {PREDICTED.name}")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not options.predict
    if not on_gpu and (reason := why_unavailable()):
        print(f"nothing was measured, as there is no GPU: {reason}")
        return
    way: Callable[[str, str], int] = measure if on_gpu else predict
    with tempfile.TemporaryDirectory() as path:
        write_model(path, **SIZES)
        found = {setting: way(path, setting) for setting in SETTINGS}
    if options.predict:
        PREDICTED.write_text(json.dumps(found, indent=2) + "\n")
    expected = json.loads(PREDICTED.read_text())
    rows: list[Row] = [
        {
            "setting": setting,
            "MiB": peak / 2**20,
            "predicted MiB": expected[setting] / 2**20,
            "measured / predicted": peak / expected[setting],
        }
        for setting, peak in found.items()
    ]
    report("peak_bytes", "peak bytes of a train call, one rank", rows, options.out)


if __name__ == "__main__":
    main()
