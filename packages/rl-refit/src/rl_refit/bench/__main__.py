"""Measure a refit on machines of one's own: `python -m rl_refit.bench`.

    python -m rl_refit.bench                           both ends here, over shared memory
    python -m rl_refit.bench --changed 0.01            patches of what has changed alone
    python -m rl_refit.bench send FILE --host 10.0.0.1     the trainer's end, for other machines
    python -m rl_refit.bench receive FILE              an engine's end, after FILE was copied there

Tensors are those of a decoder, with random values; an engine copies each to a place of its own. In
every round the tensors are first copied within the trainer's process, the measure of a refit, and
then sent. The first round, in which memory is touched for the first time, is not counted.

FILE has the address of the sender, which grants access to the weights, here random numbers. It is
readable by its owner alone, and removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_refit.bench.ends import Work, decoder_tensors, local_receivers, receive_rounds, send_rounds
from rl_refit.bench.picture import PHASES, draw, phases_of, summary, timeline
from rl_refit.sender import RefitSender
from rl_refit.source import TensorSource

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_BAD_INPUT = 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `role` is "both" without a command."""
    parser = argparse.ArgumentParser(prog="python -m rl_refit.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_sender_options(parser, transport="shm")
    parser.set_defaults(role="both", host="127.0.0.1")
    commands = parser.add_subparsers(metavar="send | receive")
    send = commands.add_parser("send", help="the trainer's end, for receivers elsewhere")
    send.add_argument("file", type=Path, help="where the address is written; must not exist")
    send.add_argument("--host", default="127.0.0.1", help="where others reach this machine")
    _add_sender_options(send, transport="chain")
    send.set_defaults(role="send")
    receive = commands.add_parser("receive", help="an engine's end")
    receive.add_argument("file", type=Path, help="what the sender has written")
    receive.add_argument("--rank", type=int, default=0, help="from 0 to the number of receivers")
    receive.add_argument("--device", default="cpu")
    receive.add_argument("--picture", type=Path, help="a file for a picture of the last round")
    receive.set_defaults(role="receive")
    return parser.parse_args(arguments)


def _add_sender_options(parser: argparse.ArgumentParser, *, transport: str) -> None:
    parser.add_argument("--mib", type=float, default=512.0, help="of all tensors together")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--transport", default=transport)
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="that are counted")
    parser.add_argument("--verify", default="digest", choices=("digest", "none"))
    parser.add_argument("--bucket-mib", type=float, help="the size of a buffer; chosen without it")
    parser.add_argument("--device", default="cpu", help="of the tensors on both sides")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--picture", type=Path, help="a file for a picture of the last round")
    parser.add_argument(
        "--changed",
        type=float,
        help="share of the elements that change before each round; sends what has changed alone",
    )


def check(options: argparse.Namespace) -> None:
    """Raise `ValueError` if an option is out of range, or a file is not as it has to be."""
    if options.picture is not None and find_spec("matplotlib") is None:
        raise ValueError(
            '--picture needs matplotlib, which is not installed: pip install "rl-refit[plot]"'
        )
    if options.role == "receive":
        if not options.file.is_file():
            raise ValueError(f"FILE={options.file} does not exist: copy what `send` has written")
        return
    for name in ("mib", "receivers", "rounds", "timeout_s"):
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(options, name)} is not positive")
    if options.changed is not None and not 0 <= options.changed <= 1:
        raise ValueError(f"--changed={options.changed} is not between 0 and 1")
    if options.role == "send" and options.file.exists():
        raise ValueError(f"FILE={options.file} exists: the address goes into a new file")


@contextmanager
def _written(path: Path, content: Mapping[str, object]) -> Generator[None]:
    """Have a file that its owner alone can read, until the block ends."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        json.dump(content, file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def open_sender(options: argparse.Namespace, tensors: Mapping[str, torch.Tensor]) -> RefitSender:
    """Return the sender of these tensors.

    Raises:
        ValueError: An option is not possible, or two are not together.
    """
    bucket_mib: float | None = options.bucket_mib
    return RefitSender(
        TensorSource(tensors.items()),
        options.transport,
        options.receivers,
        bucket_bytes=None if bucket_mib is None else int(bucket_mib * 2**20),
        verify=options.verify,
        timeout_s=options.timeout_s,
        device=options.device,
        host=options.host,
        delta=options.changed is not None,
        keep_spans=True,
    )


def run_sender(
    options: argparse.Namespace, tensors: Mapping[str, torch.Tensor], sender: RefitSender
) -> None:
    """Measure, with receivers in processes of this machine or elsewhere, and print the result."""
    work = Work(rounds=options.rounds + 1, device=options.device, timeout_s=options.timeout_s)
    with ExitStack() as stack:
        pipes: list[Connection] = []
        if options.role == "both":
            receivers = local_receivers(sender.address, options.receivers, work)
            pipes = stack.enter_context(receivers)
        else:
            waits = {"rounds": work.rounds, "timeout_s": work.timeout_s}
            content = {"address": sender.address, **waits}
            stack.enter_context(_written(options.file, content))
            print(
                f"waits for receivers of the ranks 0 to {options.receivers - 1}; for each, copy "
                f"{options.file} there and run\n"
                f"    python -m rl_refit.bench receive {options.file.name} --rank RANK",
                flush=True,
            )
        rounds = [*send_rounds(sender, tensors, work, changed=options.changed, pipes=pipes)]
    last = rounds[-1]
    title = (
        f"{last.sent.bytes / 2**20:.0f} MiB in {len(tensors)} tensors of {options.dtype}, "
        f"{options.transport}, receivers={options.receivers}, verify={options.verify}, "
        f"medians of {options.rounds} rounds"
    )
    print(summary(rounds, title=title))
    if options.picture is not None:
        ends = {f"receiver {rank}": each for rank, each in enumerate(last.received)}
        draw({"sender": last.sent, **ends}, options.picture)


def run_receiver(options: argparse.Namespace) -> None:
    """Receive all rounds of a sender elsewhere, and print what they took here."""
    content = json.loads(options.file.read_text())
    work = Work(rounds=content["rounds"], device=options.device, timeout_s=content["timeout_s"])
    received = [*receive_rounds(content["address"], options.rank, work)][1:]
    name = f"receiver {options.rank}"
    print(f"{'seconds':28}" + "".join(f"{phase:>9}" for phase in PHASES))
    print(f"{name:28}" + phases_of(received))
    print("\n".join(["", *timeline({name: received[-1]})]))
    if options.picture is not None:
        draw({name: received[-1]}, options.picture)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parse(arguments)
    try:
        check(options)
        if options.role == "receive":
            run_receiver(options)
            return 0
        tensors = decoder_tensors(options.mib, getattr(torch, options.dtype), options.device)
        sender = open_sender(options, tensors)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return _BAD_INPUT
    with sender:
        run_sender(options, tensors, sender)
    return 0


if __name__ == "__main__":
    sys.exit(main())
