"""Measure a refit on machines of one's own: `python -m rl_refit.bench`.

    python -m rl_refit.bench                             both ends here, over shared memory
    python -m rl_refit.bench --changed 0.01              patches of what has changed alone
    python -m rl_refit.bench send FILE --host 10.0.0.1   the trainer's end, for other machines
    python -m rl_refit.bench receive FILE                an engine's end, where FILE was copied to

Each of the last two has options of its own: `send --help`, `receive --help`.

Tensors are those of a decoder, with random values; an engine copies each to a place of its own. In
every round the tensors are first copied within the trainer's process, the measure of a refit, and
then sent. The first round, in which memory is touched for the first time, is not counted.

FILE has the address of the sender, which grants access to the weights, here random numbers. It is
readable by its owner alone, and removed at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from rl_refit.bench.ends import Work, decoder_tensors, local_receivers, receive_rounds, send_rounds
from rl_refit.bench.picture import draw, ends_of, summary, table
from rl_refit.errors import RefitError
from rl_refit.sender import RefitSender
from rl_refit.source import TensorSource

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_BAD_INPUT = 2


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sender tells receivers elsewhere."""

    address: dict[str, str | int]
    rounds: int
    timeout_s: float


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options, and the `role`: "send", "receive", or "both" without a command."""
    role = arguments[0] if arguments and arguments[0] in ("send", "receive") else "both"
    prog = "python -m rl_refit.bench"
    if role == "both":
        # No subparsers: an option before their command would be taken, and then forgotten.
        parser = argparse.ArgumentParser(prog, "%(prog)s [send | receive] [options]", __doc__)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        _add_sender_options(parser, transport="shm")
        parser.set_defaults(host="127.0.0.1")
    elif role == "send":
        parser = argparse.ArgumentParser(f"{prog} send")
        parser.add_argument("file", type=Path, help="where the address is written; a new file")
        parser.add_argument("--host", default="127.0.0.1", help="where others reach this machine")
        _add_sender_options(parser, transport="chain")
    else:
        parser = argparse.ArgumentParser(f"{prog} receive")
        parser.add_argument("file", type=Path, help="what the sender has written")
        parser.add_argument("--rank", type=int, default=0, help="of the receiver, from 0 on")
        parser.add_argument("--device", default="cpu")
        parser.add_argument("--picture", type=Path, help="a file for a picture of the last round")
    parser.set_defaults(role=role)
    return parser.parse_args(arguments[role != "both" :])


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
        return
    for name in ("mib", "receivers", "rounds", "timeout_s"):
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(options, name)} is not positive")
    if options.changed is not None and not 0 <= options.changed <= 1:
        raise ValueError(f"--changed={options.changed} is not between 0 and 1")
    if options.role == "send" and options.file.exists():
        raise ValueError(f"FILE={options.file} exists: the address goes into a new file")


@contextmanager
def _written(path: Path, invitation: Invitation) -> Generator[None]:
    """Have a file that its owner alone can read, until the block ends."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(msgspec.json.encode(invitation))
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
        stack.enter_context(sender)
        pipes: list[Connection] = []
        if options.role == "both":
            receivers = local_receivers(sender.address, options.receivers, work)
            pipes = stack.enter_context(receivers)
        else:
            invitation = Invitation(sender.address, work.rounds, work.timeout_s)
            stack.enter_context(_written(options.file, invitation))
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
        draw({name: reports[-1] for name, reports in ends_of(rounds).items()}, options.picture)


def read_invitation(path: Path) -> Invitation:
    """Return what a sender has written.

    Raises:
        ValueError: There is no such file, or it was not written by `send`.
    """
    if not path.is_file():
        raise ValueError(f"FILE={path} does not exist: copy what `send` has written")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Invitation)
    except msgspec.MsgspecError as error:
        raise ValueError(f"FILE={path} was not written by `send`: {error}") from error


def run_receiver(options: argparse.Namespace, invitation: Invitation) -> None:
    """Receive all rounds of a sender elsewhere, and print what they took here."""
    work = Work(rounds=invitation.rounds, device=options.device, timeout_s=invitation.timeout_s)
    received = [*receive_rounds(invitation.address, options.rank, work)][1:]
    ends = {f"receiver {options.rank}": received}
    print(table(ends))
    if options.picture is not None:
        draw({name: reports[-1] for name, reports in ends.items()}, options.picture)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        check(options)
        if options.role == "receive":
            run = partial(run_receiver, options, read_invitation(options.file))
        else:
            dtype = getattr(torch, options.dtype)
            tensors = decoder_tensors(options.mib, dtype, options.device)
            run = partial(run_sender, options, tensors, open_sender(options, tensors))
    except ValueError as error:
        return _fail(error, status=_BAD_INPUT)
    try:
        run()
    except (RefitError, TimeoutError) as error:
        return _fail(error, status=1)
    return 0


def _fail(error: Exception, *, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
