"""Rules of a transport: a process that is killed in a refit takes nobody along."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rl_refit.errors import RefitError
from rl_refit.testing.engines import Engine, require_same, some_tensors
from rl_refit.testing.leftovers import private_tempdir, shared_memory
from rl_refit.testing.pair import RefitPair

LIMIT_S = 20.0
PATIENCE_S = 2 * LIMIT_S
LATEST_S = 0.04
"""The kill comes within this time, which a refit of a slow source takes."""
NUM_RECEIVERS = 2


class SlowSource:
    """Tensors with a moment between them, so that a kill comes in time."""

    def __init__(self, pause_s: float = 0.003) -> None:
        self.tensors = some_tensors()
        self.pause_s = pause_s

    def metadata(self) -> list[tuple[str, torch.dtype, Sequence[int]]]:
        """Return name, dtype and shape of every tensor."""
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor, after a pause each."""
        for entry in self.tensors.items():
            time.sleep(self.pause_s)
            yield entry


class Actor:
    """A process that runs `main(pipe, *arguments)`; killed, or told to end."""

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        # Children of a server that has imported torch start in milliseconds.
        context = multiprocessing.get_context("forkserver")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=main, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()

    def order(self, *order: Any) -> None:
        """Tell the process what to do."""
        self.pipe.send(order)

    def answer(self) -> Any:
        """Return what the process has to say; None if it is dead."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            assert self.pipe.poll(PATIENCE_S), f"it hangs: no answer within {PATIENCE_S:g} s"
            return self.pipe.recv()
        return None

    def obey(self, *order: Any) -> None:
        """Tell the process what to do, and fail unless it does."""
        self.order(*order)
        answer = self.answer()
        assert answer == "done", f"{order[0]} ended with {answer!r}"

    def kill(self) -> None:
        """End the process without a warning."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.join()

    def join(self) -> None:
        """Tell the process to end, and wait until it has."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(("end",))
        self.process.join(LIMIT_S)
        assert not self.process.is_alive(), "it does not end"
        self.pipe.close()


def run_sender(pipe: Connection, pair: RefitPair, directory: str) -> None:
    """Send on order, and say how it went."""
    _settle(directory)
    sender = pair.open_sender(
        SlowSource(), num_receivers=NUM_RECEIVERS, timeout_s=LIMIT_S, bucket_bytes=8 << 10
    )
    pipe.send(dict(sender.address))
    while (order := pipe.recv())[0] != "end":
        call = sender.send if order[0] == "send" else sender.commit
        pipe.send(_outcome(pair, lambda c=call, v=order[1]: c(v)))
    sender.close()


def run_receiver(pipe: Connection, pair: RefitPair, directory: str, rank: int) -> None:
    """Receive on order, and say how it went and what is committed."""
    _settle(directory)
    engine: Engine | None = None
    while (order := pipe.recv())[0] != "end":
        if order[0] == "attach":
            if engine is not None:
                engine.receiver.close()
            engine = Engine(pair, order[1], rank, timeout_s=LIMIT_S)
            pipe.send("done")
            continue
        assert engine is not None
        if order[0] == "refit":
            pipe.send(_outcome(pair, lambda e=engine, v=order[1]: e.refit(v)))
        elif order[0] == "version":
            pipe.send(engine.receiver.version)
        else:
            pipe.send(_outcome(pair, lambda e=engine, v=order[1]: _require_ready(e, v)))
    if engine is not None:
        engine.receiver.close()


def _settle(directory: str) -> None:
    tempfile.tempdir = os.environ["TMPDIR"] = directory
    torch.set_num_threads(1)


def _require_ready(engine: Engine, version: int) -> None:
    ready = engine.receiver.require_ready()
    assert ready == version, f"at version {ready}, not {version}"
    require_same(engine.weights, some_tensors(), "the receiver")


def _outcome(pair: RefitPair, call: Callable[[], object]) -> Any:
    """Return "done", or the error of a refit; any other ends the process."""
    try:
        call()
    except RefitError as error:
        return error
    return "done"


class Cluster:
    """One sender and its receivers, each a process; whoever is killed is started again."""

    def __init__(self, pair: RefitPair, directory: Path) -> None:
        self.pair = pair
        self.directory = str(directory)
        self.version = 0
        self.segments: set[Path] = set()
        self.receivers = [self._receiver(rank) for rank in range(NUM_RECEIVERS)]
        self.start_sender()

    def start_sender(self) -> None:
        """Start a sender, and let the receivers know."""
        self.sender = Actor(run_sender, self.pair, self.directory)
        self.address = self.sender.answer()
        for receiver in self.receivers:
            receiver.obey("attach", self.address)

    def order_refit(self) -> None:
        """Let all begin the next version."""
        self.version += 1
        self.sender.order("send", self.version)
        for receiver in self.receivers:
            receiver.order("refit", self.version)

    def good_refit(self) -> None:
        """Refit, commit, and hold every engine against the tensors."""
        self.order_refit()
        answers = [actor.answer() for actor in (self.sender, *self.receivers)]
        assert answers == ["done"] * len(answers), f"a refit ended with {answers}"
        self.sender.obey("commit", self.version)
        for receiver in self.receivers:
            receiver.obey("ready", self.version)
        for actor in (self.sender, *self.receivers):
            self.segments |= shared_memory(actor.process.pid)

    def kill_sender(self, rng: random.Random) -> bool:
        """Kill the sender in a refit; return whether the refit failed."""
        self.order_refit()
        time.sleep(rng.uniform(0, LATEST_S))
        self.sender.kill()
        failed = self._survived(self.receivers, self.receivers)
        self.start_sender()
        return failed

    def kill_receiver(self, rng: random.Random) -> bool:
        """Kill a receiver in a refit; return whether the refit failed."""
        self.order_refit()
        time.sleep(rng.uniform(0, LATEST_S))
        index = rng.randrange(NUM_RECEIVERS)
        self.receivers[index].kill()
        others = [other for other in self.receivers if other is not self.receivers[index]]
        failed = self._survived([self.sender, *others], others)
        self.receivers[index] = self._receiver(index)
        self.receivers[index].obey("attach", self.address)
        return failed

    def close(self) -> None:
        """End all processes."""
        for actor in (self.sender, *self.receivers):
            actor.join()

    def abandon(self) -> None:
        """End all processes without waiting for what they do."""
        for actor in (self.sender, *self.receivers):
            actor.process.kill()
            actor.process.join(LIMIT_S)

    def _survived(self, survivors: Sequence[Actor], receivers: Sequence[Actor]) -> bool:
        """Fail if a survivor hangs, dies or commits; return whether the refit failed for one."""
        answers = [survivor.answer() for survivor in survivors]
        for answer in answers:
            # Some may have been done, where the kill came late.
            known = answer == "done" or isinstance(answer, RefitError)
            assert known, f"a survivor ended with {answer!r}"
        for receiver in receivers:
            receiver.order("version")
            version = receiver.answer()
            assert version != self.version, f"version {version} counts, and nobody committed it"
        return answers != ["done"] * len(answers)

    def _receiver(self, rank: int) -> Actor:
        return Actor(run_receiver, self.pair, self.directory, rank)


def _drill(
    pair: RefitPair, num_cases: int, victim: str, kill: Callable[[Cluster, random.Random], bool]
) -> None:
    # Before there is a private directory for temporary files, as the server has its own in there.
    preload = ["torch", type(pair).__module__, __name__]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    forkserver.ensure_running()
    failed = 0
    with private_tempdir() as directory:
        cluster = Cluster(pair, directory)
        try:
            cluster.good_refit()
            alive = len(list(directory.iterdir()))
            for case in range(num_cases):
                failed += kill(cluster, random.Random(f"{victim} {case}"))
                left = sorted(path.name for path in directory.iterdir())
                assert len(left) <= alive, f"the {victim} that was killed left something: {left}"
                cluster.good_refit()
            cluster.close()
        except BaseException:
            cluster.abandon()
            raise
        left = sorted(path.name for path in directory.iterdir())
        left += sorted(str(path) for path in cluster.segments if path.exists())
        assert not left, f"left behind: {left}"
    assert failed >= max(1, num_cases // 5), f"only {failed} of {num_cases} kills came in time"


def a_killed_sender_takes_nobody_along(pair: RefitPair, num_cases: int) -> None:
    """At a random moment of a refit; a full resend by another one heals."""
    _drill(pair, num_cases, "sender", Cluster.kill_sender)


def a_killed_receiver_takes_nobody_along(pair: RefitPair, num_cases: int) -> None:
    """At a random moment of a refit; a full resend to a new one and the others heals."""
    _drill(pair, num_cases, "receiver", Cluster.kill_receiver)
