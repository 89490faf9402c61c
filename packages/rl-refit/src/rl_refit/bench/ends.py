"""Both ends of a measured refit: a trainer of random tensors, and engines that copy them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_refit.protocol.waiting import Deadline
from rl_refit.receiver import RefitReceiver
from rl_refit.report import RefitReport
from rl_refit.sender import RefitSender

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Of the decoder that is sent.
_WIDTH = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What both ends do."""

    rounds: int
    """Refits, the first of which is not counted: memory is touched for the first time."""
    device: str
    """Of the tensors."""
    timeout_s: float
    """Limit of each wait, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One refit, as both ends have seen it."""

    copy_s: float
    """Seconds of copying the same tensors within the process."""
    sent: RefitReport
    received: Sequence[RefitReport] = ()
    """Of the receivers on this machine, by rank."""


def decoder_tensors(mib: float, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Return random tensors with names and shapes of a decoder's layers, of about so many MiB."""
    shapes = {f"self_attn.{name}_proj.weight": (_WIDTH, _WIDTH) for name in "qkvo"}
    shapes |= {f"mlp.{name}_proj.weight": (4 * _WIDTH, _WIDTH) for name in ("gate", "up")}
    shapes |= {"mlp.down_proj.weight": (_WIDTH, 4 * _WIDTH)}
    shapes |= {f"{name}_layernorm.weight": (_WIDTH,) for name in ("input", "post_attention")}
    layer_bytes = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    num_layers = max(1, round(mib * 2**20 / layer_bytes))
    return {
        f"model.layers.{layer}.{name}": torch.randn(shape, device=device).to(dtype)
        for layer in range(num_layers)
        for name, shape in shapes.items()
    }


def change(tensors: Mapping[str, torch.Tensor], share: float, *, seed: int) -> None:
    """Give a share of the elements, at random places, another value."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        count = round(share * tensor.numel())
        places = torch.randint(tensor.numel(), (count,), generator=generator).to(tensor.device)
        tensor.view(-1)[places] = torch.randn(count, generator=generator).to(tensor)


def receive_rounds(
    address: Mapping[str, str | int], rank: int, work: Work
) -> Iterator[RefitReport]:
    """Be an engine that copies what it gets; yield the report of each round."""
    places: dict[str, torch.Tensor] = {}

    def load(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name in places:
                places[name].copy_(tensor)
            else:
                places[name] = tensor.clone()

    with RefitReceiver(
        address, rank, device=work.device, timeout_s=work.timeout_s, keep_spans=True
    ) as receiver:
        for version in range(1, work.rounds + 1):
            receiver.begin(version)
            report = receiver.receive(version, load, load_keeps=False)
            _finish(work.device)
            deadline = Deadline(work.timeout_s)
            # Until then the sender counts on this receiver.
            while receiver.version != version:
                time.sleep(min(0.001, deadline.remaining("commit", rank=rank)))
            yield report


def _serve(pipe: Connection, address: Mapping[str, str | int], rank: int, work: Work) -> None:
    # It shares the processors with the sender and other receivers.
    torch.set_num_threads(1)
    try:
        for report in receive_rounds(address, rank, work):
            pipe.send(report)
    except Exception as error:
        pipe.send(error)
        raise


@contextmanager
def local_receivers(
    address: Mapping[str, str | int], number: int, work: Work
) -> Generator[list[Connection]]:
    """Yield the pipes of receivers in processes of their own, which end with the block."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    with ExitStack() as processes:
        for rank in range(number):
            ours, theirs = context.Pipe()
            arguments = (theirs, address, rank, work)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            processes.callback(process.join)
            processes.callback(process.kill)
            theirs.close()
            pipes.append(ours)
        yield pipes


def send_rounds(
    sender: RefitSender,
    tensors: Mapping[str, torch.Tensor],
    work: Work,
    *,
    changed: float | None,
    pipes: Sequence[Connection],
) -> Iterator[Round]:
    """Send a version a round; yield what is counted.

    Args:
        sender: Of the tensors.
        tensors: Those that are sent.
        work: See there.
        changed: Share of the elements that change before each round.
        pipes: Of the receivers on this machine.
    """
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    for version in range(1, work.rounds + 1):
        if changed is not None:
            change(tensors, changed, seed=version)
        start = time.perf_counter()
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)
        _finish(work.device)
        copy_s = time.perf_counter() - start
        sent = sender.send(version)
        sender.commit(version)
        received = [_answer(pipe, work.timeout_s) for pipe in pipes]
        if version > 1:
            yield Round(copy_s=copy_s, sent=sent, received=received)


def _answer(pipe: Connection, timeout_s: float) -> RefitReport:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"a receiver did not answer within timeout_s={timeout_s:g}")
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _finish(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
