"""Measure `train` beside a bare loop over the same model, step by step in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from one_rank import ADAMW, NextTokenLoss, chosen_logprobs, full_rows, start_worker, write_model
from report import Row, parse_options, report
from transformers import AutoModelForCausalLM

NUM_LAYERS = 4


def bare_step(model: Any, optimizer: torch.optim.Optimizer, batch: Any, *, rows: int) -> None:
    """Take an optimizer step in micro-batches of `rows`, with nothing around it."""
    device = next(model.parameters()).device
    num_targets = batch["token_mask"].sum()
    for start in range(0, batch.size, rows):
        tokens = batch["input_ids"][start : start + rows].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=tokens, use_cache=False).logits
        loss = -chosen_logprobs(logits, tokens).sum() / num_targets
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def timed(step: Callable[[], Any]) -> float:
    """Return the seconds of a step, the device's work included."""
    begin = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(sizes: dict[str, int], *, rows: int, num_rows: int, width: int, runs: int) -> Row:
    """Return both ways' fastest step, and the median ratio of steps that follow one another."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as path:
        write_model(path, **sizes)
        worker = start_worker(path, num_rows=num_rows, micro_batch_size=rows)
        bare = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).train()
    batch = full_rows(num_rows, width, sizes["vocab_size"])
    optimizer = torch.optim.AdamW(bare.parameters(), **ADAMW)
    loss_fn = NextTokenLoss()
    pairs: list[tuple[float, float]] = []
    try:
        for _ in range(runs + 1):  # the first pair warms up
            ours = timed(lambda: worker.train(batch, loss_fn))
            pairs.append((ours, timed(lambda: bare_step(bare, optimizer, batch, rows=rows))))
    finally:
        worker.shutdown()
    ours, theirs = zip(*pairs[1:], strict=True)
    return {
        **sizes,
        "rows x width": f"{num_rows} x {width}",
        "rows at a time": rows,
        "train s": min(ours),
        "bare s": min(theirs),
        "train / bare, median of pairs": median(a / b for a, b in pairs[1:]),
        "train / bare, fastest": min(ours) / min(theirs),
    }


def main() -> None:
    """Print and write the table."""
    options = parse_options(__doc__)
    if torch.cuda.is_available():
        sizes = [(1024, 32768), (1024, 151936)]
        shape = {"rows": 4, "num_rows": 16, "width": 1024, "runs": 20}
    else:
        sizes = [(256, 1024)] if options.quick else [(256, 1024), (256, 8192), (256, 32768)]
        shape = {"rows": 4, "num_rows": 16, "width": 256, "runs": 4 if options.quick else 10}
    rows = [
        measure(
            {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_layers": NUM_LAYERS},
            **shape,
        )
        for hidden_size, vocab_size in sizes
    ]
    report("train_overhead", "train beside a bare loop, one rank", rows, options.out)


if __name__ == "__main__":
    main()
