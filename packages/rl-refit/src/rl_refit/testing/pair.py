"""The two ends over one transport, faults between them, and engines that receive in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict, TypeVar, Unpack

import msgspec
import torch

from rl_refit.ends.outbound import Connections, NamedTensors, OutboundStream, Receivers
from rl_refit.plan import Bucket, WirePlan
from rl_refit.protocol.channel import Filled, Offer
from rl_refit.protocol.waiting import Closing, Deadline
from rl_refit.receiver import RefitReceiver
from rl_refit.report import RefitReport
from rl_refit.sender import RefitSender, Verify
from rl_refit.source import TensorSource, WeightSource
from rl_refit.transports import Grant, SendingSide

LIMIT_S = 300.0
"""Limit of a refit that succeeds: no rule takes as long, unless it finds that something hangs."""

Tensors = dict[str, torch.Tensor]
Result = TypeVar("Result")


class ReceiverOptions(TypedDict, total=False):
    """Options of `RefitPair.open_receiver`."""

    timeout_s: float
    expected: Sequence[tuple[str, torch.dtype, Sequence[int]]] | None
    into: Mapping[str, torch.Tensor] | None


class SenderOptions(TypedDict, total=False):
    """Options of `RefitPair.open_sender`."""

    bucket_bytes: int
    num_buffers: int
    timeout_s: float
    delta: bool
    min_receivers: int | None
    receiver_timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the sender announces when a bucket may be read."""

    bucket: int
    nbytes: int
    digest: int


class Fault:
    """A fault between a sender and its receivers; this base class injects none."""

    def announce(self, due: Announcement) -> Iterable[Announcement]:
        """Return what is announced in place of `due`."""
        return [due]

    def spoil(self, bucket: int, data: torch.Tensor) -> None:
        """Change a bucket's bytes (`[nbytes]`, uint8) in place, after they were digested."""

    def offer(self, plan: WirePlan) -> None:
        """Change the plan that is offered, in place."""

    def begin(self, plan_hash: str) -> str:
        """Return the hash that is sent at the beginning of a refit."""
        return plan_hash


class DrillSender(RefitSender):
    """A sender into which a fault can be injected."""

    _fault: Fault | None = None

    @contextmanager
    def tampered(self, fault: Fault, *, timeout_s: float) -> Generator[None]:
        """Inject `fault` in this block, in which `send` waits at most `timeout_s`."""
        kept, self._timeout_s, self._fault = self._timeout_s, timeout_s, fault
        self._stream_class = partial(_FaultyStream, fault=fault)
        try:
            yield
        finally:
            self._timeout_s, self._fault = kept, None
            self._stream_class = OutboundStream

    def _make_offer(self, side: SendingSide, grant: Grant, num_fds: int, *, delta: bool) -> Offer:
        offer = super()._make_offer(side, grant, num_fds, delta=delta)
        if self._fault is not None:
            self._fault.offer(offer.plan)
        return offer

    def _begin(self, version: int, deadline: Deadline) -> tuple[Connections, Receivers, bool]:
        if self._fault is None:
            return super()._begin(version, deadline)
        kept = self.plan
        self.plan = replace(kept, hash=self._fault.begin(kept.hash))
        try:
            return super()._begin(version, deadline)
        finally:
            self.plan = kept


@dataclass(kw_only=True)
class _FaultyStream(OutboundStream):
    fault: Fault

    def announce(self, filled: Filled) -> None:
        due = Announcement(filled.bucket, filled.nbytes, filled.digest)
        for made in self.fault.announce(due):
            announced = msgspec.structs.replace(
                filled,
                bucket=made.bucket,
                buffer=made.bucket % len(self.side.buffers),
                nbytes=made.nbytes,
                digest=made.digest,
            )
            super().announce(announced)

    def fill(self, bucket: Bucket, tensors: NamedTensors) -> Filled:
        filled = super().fill(bucket, tensors)
        self.fault.spoil(bucket.index, self.side.buffers[filled.buffer][: filled.nbytes])
        return filled


class RefitPair:
    """Makes senders and receivers over one transport. Can be pickled, for other processes.

    Args:
        transport: A name of the entry-point group `rl_refit.transports`.
        verify: As for `RefitSender`.
        device: Where buffers and received tensors are.

    Attributes:
        is_for_processes: Whether the ends can be in different processes, so that one of them can
            be killed.
        patience: Factor of the limits of a second or less in which the rules expect an answer of
            the other end. The first use of a GPU in a process takes seconds.
    """

    is_for_processes = True
    patience = 1.0

    def __init__(
        self, transport: str, *, verify: Verify = "digest", device: torch.device | str = "cpu"
    ) -> None:
        self.transport = transport
        self.verify: Verify = verify
        self.device = device

    def open_sender(
        self,
        weights: Mapping[str, torch.Tensor] | WeightSource,
        *,
        num_receivers: int = 1,
        bucket_bytes: int = 16 << 10,
        num_buffers: int = 2,
        timeout_s: float = LIMIT_S,
        delta: bool = False,
        min_receivers: int | None = None,
        receiver_timeout_s: float | None = None,
    ) -> DrillSender:
        """Return a sender; one with `num_receivers=0` only iterates over its weights."""
        return DrillSender(
            TensorSource(weights) if isinstance(weights, Mapping) else weights,
            self.transport,
            num_receivers,
            bucket_bytes=bucket_bytes,
            num_buffers=num_buffers,
            timeout_s=timeout_s,
            verify=self.verify,
            device=self.device,
            delta=delta,
            min_receivers=min_receivers,
            receiver_timeout_s=receiver_timeout_s,
        )

    def open_receiver(
        self,
        address: Mapping[str, str | int],
        rank: int = 0,
        *,
        timeout_s: float = LIMIT_S,
        expected: Sequence[tuple[str, torch.dtype, Sequence[int]]] | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> RefitReceiver:
        """Return a receiver."""
        return RefitReceiver(
            address, rank, device=self.device, timeout_s=timeout_s, expected=expected, into=into
        )

    def tamper(
        self, sender: DrillSender, fault: Fault, *, timeout_s: float
    ) -> AbstractContextManager[None]:
        """Return a context in which `fault` is injected, and the sender waits `timeout_s`."""
        return sender.tampered(fault, timeout_s=timeout_s)


class Engine:
    """Holds what a receiver has loaded, as an inference engine would."""

    def __init__(
        self,
        pair: RefitPair,
        address: Mapping[str, str | int],
        rank: int = 0,
        **options: Unpack[ReceiverOptions],
    ) -> None:
        # At run time, as a test of the kit itself may shorten the limit.
        options.setdefault("timeout_s", LIMIT_S)
        self.receiver = pair.open_receiver(address, rank, **options)
        self.weights: Tensors = {}
        self.load: Callable[[list[tuple[str, torch.Tensor]]], object] = self.keep

    def keep(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Clone the tensors of a bucket."""
        for name, tensor in tensors:
            self.weights[name] = tensor.clone()

    def refit(self, version: int) -> RefitReport:
        """Begin and receive a version."""
        self.weights.clear()
        self.receiver.begin(version)
        return self.receiver.receive(version, lambda tensors: self.load(tensors))


class World(Closing):
    """A sender of some tensors and its engines, in this process."""

    def __init__(
        self,
        pair: RefitPair,
        tensors: Mapping[str, torch.Tensor],
        num_receivers: int = 1,
        *,
        engine: ReceiverOptions | None = None,
        engine_class: type[Engine] = Engine,
        **options: Unpack[SenderOptions],
    ) -> None:
        self.pair = pair
        self.tensors = tensors
        options.setdefault("timeout_s", LIMIT_S)
        self.sender = pair.open_sender(tensors, num_receivers=num_receivers, **options)
        self.engines = [
            engine_class(pair, self.sender.address, rank, **(engine or {}))
            for rank in range(num_receivers)
        ]

    def refit(
        self,
        version: int,
        *,
        receivers: Sequence[int] | None = None,
        after_send: Callable[[], object] = lambda: None,
    ) -> list[RefitReport | Exception]:
        """Return the report or the error of the sender and of each engine.

        Args:
            version: Of the refit.
            receivers: Of `RefitSender.send`.
            after_send: Called when the sender has returned.
        """

        def send() -> RefitReport:
            try:
                if receivers is None:
                    return self.sender.send(version)
                return self.sender.send(version, receivers=receivers)
            finally:
                after_send()

        calls = [lambda e=engine: e.refit(version) for engine in self.engines]
        # The sender last: a receiver that begins after the failure of a refit waits for the next.
        *received, sent = outcomes(*calls, send)
        return [sent, *received]

    def good_refit(self, version: int, *, receivers: Sequence[int] | None = None) -> None:
        """Refit, commit, and compare every engine with the tensors."""
        must(self.refit(version, receivers=receivers))
        self.sender.commit(version)
        for rank, engine in enumerate(self.engines):
            ready = engine.receiver.require_ready()
            assert ready == version, f"receiver {rank} is at version {ready}, not {version}"
            require_same(engine.weights, self.tensors, f"receiver {rank}")

    def close(self) -> None:
        """Close all ends."""
        for engine in self.engines:
            engine.receiver.close()
        self.sender.close()


def some_tensors(seed: int = 0) -> Tensors:
    """Return layers of different dtypes, the largest tensor larger than a bucket."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {"embed.weight": normal(64, 48)}
    for layer in range(3):
        tensors[f"layers.{layer}.qkv.weight"] = normal(48, 40)
        tensors[f"layers.{layer}.mlp.weight"] = normal(40, 64).bfloat16()
        tensors[f"layers.{layer}.norm.weight"] = normal(41).half()
    tensors["steps"] = torch.randint(-9, 9, (7,), generator=generator)
    tensors["head.weight"] = normal(300, 48)
    return tensors


def require_same(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], whose: str
) -> None:
    """Fail unless both have the same tensors, bit by bit and in the same order."""
    assert list(found) == list(wanted), f"{whose} has {list(found)}, not {list(wanted)}"
    for name, tensor in wanted.items():
        kind = f"{found[name].dtype}{list(found[name].shape)}"
        due = f"{tensor.dtype}{list(tensor.shape)}"
        assert kind == due, f"{whose}: {name} is {kind}, not {due}"
        assert _bits(found[name]) == _bits(tensor), f"{whose}: {name} differs"


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def outcomes(
    *calls: Callable[[], Result], limit_s: float = 2 * LIMIT_S
) -> list[Result | Exception]:
    """Run the calls concurrently; return the result or the error of each."""
    hangs = AssertionError(f"it hangs: no end within {limit_s:g} s")
    results: list[Result | Exception] = [hangs for _ in calls]

    def run(index: int, call: Callable[[], Result]) -> None:
        try:
            results[index] = call()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    return results


def must(results: Sequence[object]) -> None:
    """Raise the first result that is an error."""
    for result in results:
        if isinstance(result, Exception):
            raise result


def require_errors(results: Sequence[object], kind: type[Exception], when: str) -> None:
    """Fail unless all of the results are errors of a kind."""
    for who, result in enumerate(results):
        name = f"receiver {who - 1}" if who else "the sender"
        assert isinstance(result, kind), f"{when}: {name} ended with {result!r}"


def refuses(kind: type[Exception], call: Callable[[], object], what: str) -> None:
    """Fail unless `call` raises an error of a kind."""
    (result,) = outcomes(call)
    assert isinstance(result, kind), f"{what} ended with {result!r}, not with {kind.__name__}"


@contextmanager
def receiver_in_thread(
    address: Mapping[str, str | int],
    rank: int = 0,
    *,
    send: Callable[[int], object],
    timeout_s: float = LIMIT_S,
) -> Generator[Callable[[int], Tensors]]:
    """Yield a function that refits to a version and returns the tensors that were received.

    It receives in a thread while it calls `send` here, and commits the version. For a test of a
    trainer that has a sender and needs its other end:

        with receiver_in_thread(address, rank, send=worker.send_weights) as refit:
            received = refit(1)

    Args:
        address: The sender's.
        rank: The receiver's.
        send: Sends a version; returns once all receivers have loaded it.
        timeout_s: Limit of one refit, in seconds.
    """
    with (
        RefitReceiver(address, rank, timeout_s=timeout_s) as receiver,
        ThreadPoolExecutor(1) as pool,
    ):

        def receive(version: int) -> Tensors:
            received: Tensors = {}
            receiver.receive(
                version, lambda pairs: received.update((name, t.clone()) for name, t in pairs)
            )
            receiver.commit(version)
            return received

        def refit(version: int) -> Tensors:
            receiver.begin(version)
            receiving = pool.submit(receive, version)
            send(version)
            return receiving.result(timeout_s)

        yield refit
