"""Measure refits into 1 to 16 processes: what the trainer sends and works, and how time grows.

For each transport and number of receivers, medians over the rounds of verified refits, whose
receivers drop what they get:

- sent: bytes that the trainer has sent, over those of the model; `collective` does not count its;
- trainer CPU: seconds of processor time of the trainer's process;
- CPU per receiver: the same of a receiver's process, the mean;
- seconds: of the refit; growth: those over the seconds with one receiver.

Every receiver of a chain receives and digests the model and passes it on. On a machine with fewer
processors than receivers the seconds are those of this work, one after the other: there the
trainer's own bytes and processor time tell whether the number of receivers costs it anything.
`--limit` holds the rate of each connection's sender, in MB/s, as a slow network does: then the
seconds tell whether the chain is a pipeline.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from report import Row, report
from rl_refit import RefitReceiver, RefitSender, TensorSource
from rl_refit.transports import frames
from rl_refit.transports.chain import ChainSender

GOAL_SENT, GOAL_GROWTH = 1.001, 1.3
WIDTH = 2048
LIMIT_S = 300.0


def make_tensors(megabytes: int) -> dict[str, torch.Tensor]:
    """Return layers of bfloat16 matrices, of that size in all."""
    rows = 2 * WIDTH
    count = max(1, round(megabytes * 1e6 / (2 * WIDTH * rows)))
    return {
        f"layers.{index}.weight": torch.ones(rows, WIDTH, dtype=torch.bfloat16)
        for index in range(count)
    }


def serve(pipe: Connection, address: dict[str, str | int], rank: int, limit: float | None) -> None:
    """Be a receiving process: receive the versions that the driver names."""
    torch.set_num_threads(1)
    hold_rate(limit)
    with RefitReceiver(address, rank, timeout_s=LIMIT_S) as receiver:
        while (version := pipe.recv()) is not None:
            start = time.process_time()
            receiver.begin(version)
            receiver.receive(version, lambda tensors: None)
            receiver.commit(version)
            pipe.send(time.process_time() - start)


def hold_rate(limit: float | None) -> None:
    """Make each connection of a chain send at most so many MB/s from now on, in this process."""
    if limit is None:
        return
    send, chunk = frames.send_frame, 1 << 18

    def slowly(sock: object, data: bytes | memoryview) -> None:
        # In frames of a chunk, each of which takes as long as the rate says.
        for start in range(0, max(len(data), 1), chunk):
            part = memoryview(data)[start : start + chunk]
            until = time.monotonic() + len(part) / (limit * 1e6)
            send(sock, part)
            time.sleep(max(0.0, until - time.monotonic()))

    frames.send_frame = slowly


def measure(
    tensors: dict[str, torch.Tensor],
    transport: str,
    num_receivers: int,
    *,
    rounds: int,
    limit: float | None,
) -> Row:
    """Return the row of one number of receivers."""
    nbytes = sum(each.nbytes for each in tensors.values())
    context = mp.get_context("fork")
    with RefitSender(
        TensorSource(tensors), transport, num_receivers, timeout_s=LIMIT_S, bucket_bytes=16 << 20
    ) as sender:
        pipes: list[Connection] = []
        processes: list[mp.process.BaseProcess] = []
        for rank in range(num_receivers):
            pipe, other = context.Pipe()
            arguments = (other, dict(sender.address), rank, limit)
            processes.append(context.Process(target=serve, args=arguments, daemon=True))
            processes[-1].start()
            other.close()
            pipes.append(pipe)
        seconds: list[float] = []
        trainer: list[float] = []
        receivers: list[float] = []
        for version in range(1, rounds + 2):
            for pipe in pipes:
                pipe.send(version)
            start = time.process_time()
            sent = sender.send(version)
            spent = time.process_time() - start
            sender.commit(version)
            of_receivers = [pipe.recv() for pipe in pipes]
            if version > 1:  # the first one connects
                seconds.append(sent.seconds)
                trainer.append(spent)
                receivers.append(statistics.mean(of_receivers))
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(60)
        served = served_by(sender)
    return {
        "transport": transport,
        "receivers": num_receivers,
        "sent": "" if served is None else served / (nbytes * (rounds + 1)),
        "trainer CPU s": statistics.median(trainer),
        "CPU s per receiver": statistics.median(receivers),
        "seconds": statistics.median(seconds),
    }


def served_by(sender: RefitSender) -> int | None:
    """Return the bytes that the sender has sent, None if its transport does not count them."""
    connections = sender._connections
    assert connections is not None
    return connections.side.bytes_served if isinstance(connections.side, ChainSender) else None


def with_growth(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their times over that of one receiver."""
    first = {row["transport"]: row for row in reversed(rows)}
    return [
        {
            **row,
            "growth": row["seconds"] / first[row["transport"]]["seconds"],
            "CPU growth": row["trainer CPU s"] / first[row["transport"]]["trainer CPU s"],
        }
        for row in rows
    ]


def main() -> int:
    """Print and write the table; the exit status is 1 if the chain misses a goal.

    Growth is held where there is a processor for each process, or a rate.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--receivers", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--transports", nargs="+", default=["chain", "collective"])
    parser.add_argument("--limit", type=float, help="MB/s of each connection of a chain")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hold_rate(options.limit)
    tensors = make_tensors(options.mb)
    rows = with_growth(
        [
            measure(tensors, transport, num, rounds=options.rounds, limit=options.limit)
            for transport in options.transports
            for num in options.receivers
        ]
    )
    rate = "" if options.limit is None else f" at {options.limit:g} MB/s"
    report("fanout", f"refits of {options.mb} MB of bfloat16{rate}", rows, options.out)
    chain = [row for row in rows if row["transport"] == "chain"]
    processors = len(os.sched_getaffinity(0))
    missed = [row for row in chain if row["sent"] > GOAL_SENT]
    missed += [
        row
        for row in chain
        if row["growth"] > GOAL_GROWTH
        and (row["receivers"] < processors or options.limit is not None)
    ]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
