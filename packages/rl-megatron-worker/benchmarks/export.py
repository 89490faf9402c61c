"""Measure the weights on their way out against a plain copy of the state dict, in turns."""

from __future__ import annotations

import tempfile
from statistics import median

import torch
from report import Row, parse_options, report
from rl_megatron_worker import MegatronPolicyWorker
from train_overhead import job, start, timed, write_model


def measure(*, hidden_size: int, runs: int) -> Row:
    """Return GB/s of both ways, and the median ratio of neighbours in time."""
    with tempfile.TemporaryDirectory() as path:
        write_model(path, vocab_size=8192, hidden_size=hidden_size)
        worker = start(MegatronPolicyWorker, path, "megatron_cfg", num_rows=4, rows=4)
    num_bytes = sum(each.nbytes for each in worker.model[0].parameters())

    def export() -> None:
        for _ in worker.weight_source:
            pass

    def copy() -> list[torch.Tensor]:
        return [each.detach().clone() for each in worker.model[0].parameters()]

    turns = [(timed(export), timed(copy)) for _ in range(runs + 1)][1:]
    worker.shutdown()
    return {
        "MB": num_bytes / 1e6,
        "export GB/s": num_bytes / min(own for own, _ in turns) / 1e9,
        "copy GB/s": num_bytes / min(plain for _, plain in turns) / 1e9,
        "export / copy": median(plain / own for own, plain in turns),
    }


def main() -> None:
    """Print and write the table."""
    options = parse_options(__doc__)
    with job():
        rows = [
            measure(hidden_size=hidden_size, runs=9)
            for hidden_size in ([512] if options.quick else [512, 1024])
        ]
    report("megatron_export", "weights on their way out, one rank", rows, options.out)


if __name__ == "__main__":
    main()
