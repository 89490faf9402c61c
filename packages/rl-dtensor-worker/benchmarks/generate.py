"""Measure `generate` against the length of completions, in turns with transformers' own `generate`.

No row ends early, so that all sample the same number of tokens. `own` is what a call takes outside
of the model's forward: sampling, stop conditions and rows. Its exponent is that of the tokens of a
row: 1 where a token costs the same wherever it stands.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from one_rank import NUM_WORDS, full_rows, start_worker, write_model
from report import Row, parse_options, report
from rl_batched_data import BatchedDataDict
from transformers import AutoModelForCausalLM

ROWS, PROMPT = 16, 16
WAYS = {"ours": None, "ours, stop strings": ["no such text", "nor this"]}


def prompts() -> BatchedDataDict[Any]:
    """Return the prompts, all of one length."""
    rows = full_rows(ROWS, PROMPT, NUM_WORDS)
    return BatchedDataDict(input_ids=rows["input_ids"], input_lengths=rows["input_lengths"])


@contextmanager
def timed_forward(model: Any) -> Generator[list[float], None, None]:
    """Add the processor seconds of every forward of `model` to the list."""
    begun: list[float] = []
    seconds: list[float] = []
    hooks = [
        model.register_forward_pre_hook(lambda *_: begun.append(time.process_time())),
        model.register_forward_hook(
            lambda *_: seconds.append(time.process_time() - begun.pop()), always_call=True
        ),
    ]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


def measure(call: Callable[[], Any], model: Any) -> tuple[float, float]:
    """Return the processor seconds of a call, and those outside of `model`'s forward."""
    with timed_forward(model) as forwards:
        begin = time.process_time()
        call()
        total = time.process_time() - begin
    return total, total - sum(forwards)


def exponent(lengths: list[int], seconds: list[float]) -> float:
    """Return the slope of the fit of log seconds to log length."""
    xs, ys = [math.log(each) for each in lengths], [math.log(each) for each in seconds]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def runs_of(path: str, length: int, runs: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds of each way at one length, measured in turns."""
    rows = prompts()
    workers: dict[str, Any] = {}
    for way, strings in WAYS.items():
        generation = {"max_new_tokens": length, "temperature": 1.0, "stop_strings": strings}
        options: dict[str, Any] = {"generation": generation, "generation_batch_size": ROWS}
        workers[way] = start_worker(path, num_rows=ROWS, micro_batch_size=ROWS, **options)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    calls: dict[str, tuple[Callable[[], Any], Any]] = {
        way: (lambda worker=worker: worker.generate(rows), worker.model)
        for way, worker in workers.items()
    }
    options = {"max_new_tokens": length, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    options |= {"eos_token_id": None, "attention_mask": torch.ones_like(rows["input_ids"])}
    calls["transformers"] = (lambda: plain.generate(rows["input_ids"], **options), plain)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in calls}
    for _ in range(runs + 1):
        for way, (call, model) in calls.items():
            found[way].append(measure(call, model))
    for worker in reversed(workers.values()):
        worker.shutdown()
    return {
        way: (median(total for total, _ in each[1:]), median(own for _, own in each[1:]))
        for way, each in found.items()
    }


def main() -> None:
    """Print and write the table."""
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    lengths = [64, 128, 256] if options.quick else [64, 128, 256, 512, 1024]
    with tempfile.TemporaryDirectory() as path:
        write_model(path, vocab_size=NUM_WORDS, hidden_size=64, num_layers=2)
        found = [runs_of(path, length, 3 if options.quick else 5) for length in lengths]
    rows: list[Row] = []
    for way in found[0]:
        own = exponent(lengths, [each[way][1] for each in found])
        for length, each in zip(lengths, found, strict=True):
            total, outside = each[way]
            rows.append(
                {
                    "way": way,
                    "new tokens": length,
                    "tokens per processor second": ROWS * length / total,
                    "time / transformers": total / each["transformers"][0],
                    "own ms per step": 1000 * outside / length,
                    "exponent of own": own,
                }
            )
    report("generate", f"{ROWS} completions, one rank", rows, options.out)


if __name__ == "__main__":
    main()
