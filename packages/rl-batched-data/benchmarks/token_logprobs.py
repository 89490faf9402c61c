"""Measure token log-probabilities with their gradients: time and peak memory.

From hidden states through the output matrix: a dense head with `log_softmax` and `gather`, a dense
head with TRL's `selective_log_softmax`, and ours from logits and from hidden states; on a GPU,
Liger's fused linear cross-entropy too. Each runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from report import Row, parse_options, report
from rl_batched_data import token_logprobs

Scorer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# What a way of scoring needs to be there: a package, or a GPU as well.
PACKAGES = {"trl selective_log_softmax": "trl", "liger fused linear": "liger_kernel"}


def dense(hidden: torch.Tensor, tokens: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of a dense head."""
    scores = torch.log_softmax((hidden @ matrix.T).float(), dim=-1)
    return scores[:, :-1].gather(2, tokens[:, 1:, None])


def selective(hidden: torch.Tensor, tokens: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of a dense head, by TRL."""
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax((hidden @ matrix.T)[:, :-1], tokens[:, 1:])


def from_logits(hidden: torch.Tensor, tokens: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of a dense head, by us."""
    return token_logprobs(hidden @ matrix.T, tokens)


def from_hidden(hidden: torch.Tensor, tokens: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities without a dense head."""
    return token_logprobs(hidden, tokens, output_matrix=matrix)


def liger(hidden: torch.Tensor, tokens: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the sum of the log-probabilities, by Liger."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    flat = hidden[:, :-1].flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    return -liger_fused_linear_cross_entropy(flat, matrix, targets, reduction="sum")


WAYS: dict[str, Scorer] = {
    "log_softmax + gather": dense,
    "trl selective_log_softmax": selective,
    "ours from logits": from_logits,
    "ours from hidden states": from_hidden,
    "liger fused linear": liger,
}


def measure(way: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> Row:
    """Return the fastest of three runs, and the peak over inputs and their gradients."""
    num_tokens, vocab, hidden_size = sizes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(2, num_tokens // 2, hidden_size, device=device) / hidden_size**0.5
    matrix = torch.randn(vocab, hidden_size, device=device).to(dtype).requires_grad_()
    tokens = torch.randint(0, vocab, (2, num_tokens // 2), device=device)
    tokens[:, :2] = 0
    hidden = hidden.to(dtype).requires_grad_()
    hidden.grad, matrix.grad = torch.ones_like(hidden), torch.ones_like(matrix)
    # What a first call imports and sets up is not counted.
    WAYS[way](hidden[:, :2].detach(), tokens[:, :2], matrix[:9].detach())
    before = peak_bytes()
    times: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        WAYS[way](hidden, tokens, matrix).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    # Gradients are added to those there are: one run holds both for a while.
    own = hidden.nbytes + matrix.nbytes
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "way": way,
        "seconds": min(times),
        "peak MiB": (peak_bytes() - before - own) / 2**20,
    }


def peak_bytes() -> int:
    """Return the most memory that this process has held so far."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_available(way: str) -> bool:
    """Return whether a way can be measured here, and say which cannot."""
    package = PACKAGES.get(way)
    if package is not None and importlib.util.find_spec(package) is None:
        print(f"skipped {way!r}: {package} is not installed")
        return False
    if package == "liger_kernel" and not torch.cuda.is_available():
        print(f"skipped {way!r}: it needs a GPU")
        return False
    return True


def main() -> None:
    """Print and write the table."""
    options = parse_options(__doc__)
    sizes = (512, 32_768, 256) if options.quick else (2048, 131_072, 128)
    if torch.cuda.is_available():
        sizes = (16_384, 131_072, 2048)
    rows: list[Row] = []
    spawn = multiprocessing.get_context("spawn")
    for dtype in (torch.float32, torch.bfloat16):
        for way in filter(is_available, WAYS):
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                rows.append(process.submit(measure, way, sizes, dtype).result(timeout=600))
    for row in rows:
        (dense_row,) = (
            each
            for each in rows
            if (each["dtype"], each["way"]) == (row["dtype"], "log_softmax + gather")
        )
        row["seconds / dense"] = row["seconds"] / dense_row["seconds"]
        row["peak / dense"] = row["peak MiB"] / dense_row["peak MiB"]
    title = f"{sizes[0]} tokens, vocabulary {sizes[1]}, hidden size {sizes[2]}: with gradients"
    report("token_logprobs", title, rows, options.out)


if __name__ == "__main__":
    main()
