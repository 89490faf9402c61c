"""Measure a worker's calls beside bare loops over the same model and rows, call by call in turns.

`train` stands beside a bare loop, of FSDP2 where there are several ranks; `get_logprobs` beside
plain transformers, which on several ranks has a copy of the model on each. Ratios are medians of
pairs. Processor seconds are those of one rank; other work on the machine changes them little.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from one_rank import (
    ADAMW,
    NextTokenLoss,
    become_rank,
    chosen_logprobs,
    free_port,
    full_rows,
    make_worker,
    write_model,
)
from report import Row, parse_options, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

Seconds = tuple[float, float]
"""Wall clock and processor."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model, its rows, and the ranks."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_rows: int
    """Of a call on each rank."""
    rows_per_step: int
    rows: int
    """Of a micro-batch."""
    width: int
    ranks: int = 1
    replicas: int | str = 1
    """`data_parallel_replicate_size`."""

    @property
    def model(self) -> dict[str, int]:
        """The arguments of `write_model`."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
        }


def deep(vocab_size: int, *, hidden_size: int = 256, width: int = 256) -> Work:
    """Return four layers, where computing takes longer than what is around it."""
    return Work(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_layers=4,
        num_rows=16,
        rows_per_step=16,
        rows=4,
        width=width,
    )


def toy(ranks: int, replicas: int | str = 1) -> Work:
    """Return the size of the recipes' built-in model, where nothing hides what is around it."""
    return Work(
        hidden_size=64,
        vocab_size=258,
        num_layers=2,
        num_rows=256,
        rows_per_step=128,
        rows=128,
        width=18,
        ranks=ranks,
        replicas=replicas,
    )


def bare_steps(model: Any, optimizer: torch.optim.Optimizer, batch: Any, work: Work) -> None:
    """Take a call's optimizer steps, with nothing around them."""
    device = next(model.parameters()).device
    for first in range(0, work.num_rows, work.rows_per_step):
        num_targets = work.rows_per_step * (work.width - 1) * work.ranks
        for start in range(first, first + work.rows_per_step, work.rows):
            tokens = batch["input_ids"][start : start + work.rows].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(input_ids=tokens, use_cache=False).logits
            loss = -chosen_logprobs(logits, tokens).sum() / num_targets
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def plain_logprobs(model: Any, batch: Any, work: Work) -> list[torch.Tensor]:
    """Return the log-probabilities of a call's rows."""
    device = next(model.parameters()).device
    found: list[torch.Tensor] = []
    for start in range(0, work.num_rows, work.rows):
        tokens = batch["input_ids"][start : start + work.rows].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=tokens, use_cache=False).logits
        found.append(chosen_logprobs(logits, tokens).cpu())
    return found


def load_bare(path: str, work: Work, device: str) -> tuple[Any, Any]:
    """Return the model to train, sharded if there are several ranks, and one to score with."""

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)

    trained = load().train()
    if work.ranks > 1:
        mesh = init_device_mesh(device, (work.ranks,))
        for layer in trained.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(trained, mesh=mesh)
        trained.set_gradient_divide_factor(1.0)
        trained.set_force_sum_reduction_for_comms(True)
    return trained, load().eval()


def timed(call: Callable[[], Any], work: Work) -> Seconds:
    """Return the seconds of a call, the device's work included."""
    if work.ranks > 1:
        dist.barrier()
    used, begin = time.process_time(), time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin, time.process_time() - used


def measure_rank(rank: int, port: int, path: str, work: Work, runs: int, results: Any) -> None:
    """Measure as one rank; the first puts each call's seconds, ours and the bare ones, in turns."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and work.ranks > 1:
        torch.set_num_threads(1)
    become_rank(rank, world_size=work.ranks, port=port)
    worker = make_worker(
        path,
        num_rows=work.rows_per_step * work.ranks,
        micro_batch_size=work.rows,
        dtensor_cfg={"enabled": True, "data_parallel_replicate_size": work.replicas},
    )
    trained, scored = load_bare(path, work, device)
    optimizer = torch.optim.AdamW(trained.parameters(), **ADAMW)
    batch, loss_fn = full_rows(work.num_rows, work.width, work.vocab_size), NextTokenLoss()
    calls: dict[str, Callable[[], Any]] = {
        "prepare_for_lp_inference": worker.prepare_for_lp_inference,
        "logprobs": lambda: worker.get_logprobs(batch),
        "plain": lambda: plain_logprobs(scored, batch, work),
        "prepare_for_training": worker.prepare_for_training,
        "train": lambda: worker.train(batch, loss_fn),
        "bare": lambda: bare_steps(trained, optimizer, batch, work),
    }
    found: dict[str, list[Seconds]] = {name: [] for name in calls}
    try:
        for _ in range(runs + 1):
            for name, call in calls.items():
                found[name].append(timed(call, work))
    finally:
        worker.shutdown()
    if rank == 0:
        results.put({name: seconds[1:] for name, seconds in found.items()})  # the first warms up


def measure(work: Work, *, runs: int) -> Row:
    """Return the medians of the calls, and of the ratios of those that follow one another."""
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    with tempfile.TemporaryDirectory() as path:
        write_model(path, **work.model)
        ranks = [
            context.Process(target=measure_rank, args=(rank, port, path, work, runs, results))
            for rank in range(work.ranks)
        ]
        for process in ranks:
            process.start()
        found = results.get(timeout=600)
        for process in ranks:
            process.join(timeout=60)

    def ms(name: str) -> float:
        return 1000 * median(wall for wall, _ in found[name])

    def ratio(ours: str, theirs: str, clock: int) -> float:
        return median(a[clock] / b[clock] for a, b in zip(found[ours], found[theirs], strict=True))

    return {
        **work.model,
        "ranks": work.ranks,
        "replicas": str(work.replicas),
        "rows x width": f"{work.num_rows} x {work.width}",
        "rows at a time": work.rows,
        "train ms": ms("train"),
        "train / bare": ratio("train", "bare", 0),
        "train / bare, processor": ratio("train", "bare", 1),
        "get_logprobs ms": ms("logprobs"),
        "get_logprobs / plain": ratio("logprobs", "plain", 0),
        "get_logprobs / plain, processor": ratio("logprobs", "plain", 1),
        "prepare_for_training ms": ms("prepare_for_training"),
        "prepare_for_lp_inference ms": ms("prepare_for_lp_inference"),
    }


def main() -> None:
    """Print and write the table."""
    options = parse_options(__doc__)
    works: Sequence[Work]
    if torch.cuda.is_available():
        works = [deep(size, hidden_size=1024, width=1024) for size in (32768, 151936)]
        runs = 20
    else:
        toys = [toy(1), toy(2), toy(2, "auto")]
        works = [*toys, *map(deep, [1024] if options.quick else [1024, 8192, 32768])]
        runs = 8 if options.quick else 15
    rows = [measure(work, runs=runs) for work in works]
    report("train_overhead", "calls of a worker beside bare loops", rows, options.out)


if __name__ == "__main__":
    main()
