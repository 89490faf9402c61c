"""Rules of a transport: if a process is killed during a refit, all others survive and recover."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

import torch

from rl_refit.errors import RefitError
from rl_refit.report import RefitReport
from rl_refit.testing.leftovers import private_tempdir, shared_memory
from rl_refit.testing.losses import require_surviving
from rl_refit.testing.pair import Engine, RefitPair, SenderOptions, require_same, some_tensors
from rl_refit.testing.staging import StagingEngine

LIMIT_S = 300.0
PATIENCE_S = 2 * LIMIT_S
LATEST_S = 0.04
"""The kill comes within this time; a refit of a `SlowSource` takes about as long."""
NUM_RECEIVERS = 2


ProcessContext = ForkServerContext | SpawnContext
"""A multiprocessing context."""


def process_context(device: str | torch.device, *, preload: Sequence[str]) -> ProcessContext:
    """Return the multiprocessing context of processes that work on `device`.

    They are forked from a server, which starts them in milliseconds. No fork of a process that has
    asked for CUDA can use it, and an import may ask: where a first fork cannot use the device, they
    are spawned.

    Args:
        device: Where the tensors of the processes are.
        preload: The modules that the server imports; a name that it does not find is skipped.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    device = torch.device(device)
    if device.type == "cpu" or _forks_can_use(device):
        return context
    return multiprocessing.get_context("spawn")


@functools.cache
def _forks_can_use(device: torch.device) -> bool:
    process = multiprocessing.get_context("forkserver").Process(target=_use, args=(device,))
    process.start()
    process.join(PATIENCE_S)
    can = process.exitcode == 0
    process.kill()
    process.join(PATIENCE_S)
    process.close()
    return can


def _use(device: torch.device) -> None:
    try:
        torch.ones(1, device=device).sum().item()
    except (RuntimeError, AssertionError):  # of CUDA, and of a torch without it
        sys.exit(1)


class SlowSource:
    """Tensors with a pause before each, so that a kill hits the refit."""

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
    """A process that runs `main(pipe, *arguments)` and executes commands."""

    def __init__(
        self, main: Callable[..., None], *arguments: object, context: ProcessContext
    ) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=main, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()

    def send(self, *command: object) -> None:
        """Send a command, without waiting for its result."""
        self.pipe.send(command)

    def result(self) -> object:
        """Return the result of the last command; None if the process is dead."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            assert self.pipe.poll(PATIENCE_S), f"it hangs: no answer within {PATIENCE_S:g} s"
            return self.pipe.recv()
        return None

    def run(self, *command: object) -> None:
        """Send a command, wait for it, and fail unless it succeeds."""
        self.send(*command)
        result = self.result()
        assert result == "done", f"{command[0]} ended with {result!r}"

    def kill(self) -> None:
        """End the process by SIGKILL."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.join()

    def join(self) -> None:
        """Send the command to end, and wait until the process has."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(("end",))
        self.process.join(LIMIT_S)
        assert not self.process.is_alive(), "it does not end"
        self.pipe.close()


def run_sender(
    pipe: Connection, pair: RefitPair, directory: str, min_receivers: int | None
) -> None:
    """Send and commit on command; reply to each command with its outcome."""
    _settle(directory)
    options: SenderOptions = {"timeout_s": LIMIT_S, "bucket_bytes": 8 << 10}
    if min_receivers is not None:
        options["min_receivers"] = min_receivers
    sender = pair.open_sender(SlowSource(), num_receivers=NUM_RECEIVERS, **options)
    pipe.send(dict(sender.address))
    while (command := pipe.recv())[0] != "end":
        if command[0] == "send to":
            pipe.send(_outcome(lambda c=command: sender.send(c[1], receivers=[c[2]])))
            continue
        call = sender.send if command[0] == "send" else sender.commit
        pipe.send(_outcome(lambda c=call, v=command[1]: c(v)))
    sender.close()


def run_receiver(
    pipe: Connection, pair: RefitPair, directory: str, rank: int, is_staging: bool
) -> None:
    """Attach to a sender, refit and report on command; reply to each command with its outcome."""
    _settle(directory)
    make = StagingEngine if is_staging else Engine
    engine: Engine | None = None
    while (command := pipe.recv())[0] != "end":
        if command[0] == "attach":
            if engine is not None:
                engine.receiver.close()
            engine = make(pair, command[1], rank, timeout_s=LIMIT_S)
            pipe.send("done")
            continue
        assert engine is not None
        if command[0] == "refit":
            pipe.send(_outcome(lambda e=engine, v=command[1]: e.refit(v)))
        elif command[0] == "version":
            pipe.send(engine.receiver.version)
        else:
            pipe.send(_outcome(lambda e=engine, v=command[1]: _require_ready(e, v)))
    if engine is not None:
        engine.receiver.close()


def _settle(directory: str) -> None:
    tempfile.tempdir = os.environ["TMPDIR"] = directory
    torch.set_num_threads(1)


def _require_ready(engine: Engine, version: int) -> None:
    ready = engine.receiver.require_ready()
    assert ready == version, f"at version {ready}, not {version}"
    require_same(engine.weights, some_tensors(), "the receiver")


def _outcome(call: Callable[[], object]) -> object:
    """Return "done", or whom a refit has dropped, or its error; others end the process."""
    try:
        report = call()
    except RefitError as error:
        return error
    if isinstance(report, RefitReport) and report.dropped:
        return sorted(report.dropped)
    return "done"


class Cluster:
    """A sender and its receivers, one process each; a killed process is restarted."""

    def __init__(
        self,
        pair: RefitPair,
        directory: Path,
        context: ProcessContext,
        *,
        is_staging: bool = False,
        min_receivers: int | None = None,
    ) -> None:
        self.pair = pair
        self.min_receivers = min_receivers
        self.is_staging = is_staging
        self.context = context
        self.directory = str(directory)
        self.version = 0
        self.segments: set[Path] = set()
        self.receivers = [self._receiver(rank) for rank in range(NUM_RECEIVERS)]
        self.start_sender()

    def start_sender(self) -> None:
        """Start a sender, and attach the receivers to it."""
        self.sender = self._actor(run_sender, self.min_receivers)
        self.address = self.sender.result()
        for receiver in self.receivers:
            receiver.run("attach", self.address)

    def start_refit(self) -> None:
        """Start the refit to the next version in all processes, without waiting for it."""
        self.version += 1
        self.sender.send("send", self.version)
        for receiver in self.receivers:
            receiver.send("refit", self.version)

    def good_refit(self) -> None:
        """Refit, commit, and compare every engine with the tensors."""
        self.start_refit()
        answers = [actor.result() for actor in (self.sender, *self.receivers)]
        assert answers == ["done"] * len(answers), f"a refit ended with {answers}"
        self.sender.run("commit", self.version)
        for receiver in self.receivers:
            receiver.run("ready", self.version)
        for actor in (self.sender, *self.receivers):
            self.segments |= shared_memory(actor.process.pid)

    def kill_sender(self, rng: random.Random) -> bool:
        """Kill the sender in a refit; return whether the refit failed."""
        self.start_refit()
        time.sleep(rng.uniform(0, LATEST_S))
        self.sender.kill()
        failed = self._survived(self.receivers, self.receivers)
        self.start_sender()
        return failed

    def kill_sender_of_staging(self, rng: random.Random) -> bool:
        """Kill the sender in a staged refit, which the receivers must not be affected by."""
        committed = self.version
        self.start_refit()
        time.sleep(rng.uniform(0, LATEST_S))
        self.sender.kill()
        failed = self._survived(self.receivers, self.receivers)
        for receiver in self.receivers:
            receiver.run("ready", committed)
        self.start_sender()
        return failed

    def kill_receiver(self, rng: random.Random) -> bool:
        """Kill a receiver in a refit; return whether the refit failed."""
        self.start_refit()
        time.sleep(rng.uniform(0, LATEST_S))
        index = rng.randrange(NUM_RECEIVERS)
        self.receivers[index].kill()
        others = [other for other in self.receivers if other is not self.receivers[index]]
        failed = self._survived([self.sender, *others], others)
        self.receivers[index] = self._receiver(index)
        self.receivers[index].run("attach", self.address)
        return failed

    def kill_receiver_of_some(self, rng: random.Random) -> bool:
        """Kill a receiver in a refit that the others commit, and let a new one catch up alone.

        Returns:
            Whether the refit has dropped it.
        """
        self.start_refit()
        time.sleep(rng.uniform(0, LATEST_S))
        index = rng.randrange(NUM_RECEIVERS)
        self.receivers[index].kill()
        others = [other for other in self.receivers if other is not self.receivers[index]]
        sent = self.sender.result()
        assert sent in ("done", [index]), f"the sender ended with {sent!r}"
        for other in others:
            answer = other.result()
            assert answer == "done", f"receiver beside the killed one ended with {answer!r}"
        self.sender.run("commit", self.version)
        for other in others:
            other.run("ready", self.version)
        new = self.receivers[index] = self._receiver(index)
        new.run("attach", self.address)
        self.sender.send("send to", self.version, index)
        new.run("refit", self.version)
        assert self.sender.result() == "done"
        self.sender.run("commit", self.version)
        for receiver in self.receivers:
            receiver.run("ready", self.version)
        return sent != "done"

    def close(self) -> None:
        """End all processes."""
        for actor in (self.sender, *self.receivers):
            actor.join()

    def abandon(self) -> None:
        """Kill all processes."""
        for actor in (self.sender, *self.receivers):
            actor.process.kill()
            actor.process.join(LIMIT_S)

    def _survived(self, survivors: Sequence[Actor], receivers: Sequence[Actor]) -> bool:
        """Fail if a survivor hangs, dies or commits; return whether the refit failed for one."""
        answers = [survivor.result() for survivor in survivors]
        for answer in answers:
            # If the kill came late, some survivors had finished before it.
            known = answer == "done" or isinstance(answer, RefitError)
            assert known, f"a survivor ended with {answer!r}"
        for receiver in receivers:
            receiver.send("version")
            version = receiver.result()
            assert version != self.version, f"version {version} is committed without a commit"
        return answers != ["done"] * len(answers)

    def _receiver(self, rank: int) -> Actor:
        return self._actor(run_receiver, rank, self.is_staging)

    def _actor(self, main: Callable[..., None], *arguments: object) -> Actor:
        return Actor(main, self.pair, self.directory, *arguments, context=self.context)


def _drill(
    pair: RefitPair,
    num_cases: int,
    victim: str,
    kill: Callable[[Cluster, random.Random], bool],
    *,
    is_staging: bool = False,
    min_receivers: int | None = None,
) -> None:
    # Before temporary files are redirected, as the fork server keeps a directory of its own there.
    preload = ["torch", type(pair).__module__, __name__]
    context = process_context(pair.device, preload=preload)
    if isinstance(context, ForkServerContext):
        forkserver.ensure_running()
    failed = 0
    with private_tempdir() as directory:
        cluster = Cluster(
            pair, directory, context, is_staging=is_staging, min_receivers=min_receivers
        )
        try:
            cluster.good_refit()
            alive = len(list(directory.iterdir()))
            for case in range(num_cases):
                failed += kill(cluster, random.Random(f"{victim} {case}"))
                left = sorted(path.name for path in directory.iterdir())
                assert len(left) <= alive, f"the killed {victim} left files: {left}"
                cluster.good_refit()
            cluster.close()
        except BaseException:
            cluster.abandon()
            raise
        left = sorted(path.name for path in directory.iterdir())
        left += sorted(str(path) for path in cluster.segments if path.exists())
        assert not left, f"left behind: {left}"
    assert failed >= max(1, num_cases // 5), f"only {failed} of {num_cases} kills hit a refit"


def receivers_survive_a_killed_sender(pair: RefitPair, num_cases: int) -> None:
    """Killed at a random moment of a refit; a complete refit from a new sender heals."""
    _drill(pair, num_cases, "sender", Cluster.kill_sender)


def others_survive_a_killed_receiver(pair: RefitPair, num_cases: int) -> None:
    """Killed at a random moment of a refit; a complete refit with a new receiver heals."""
    _drill(pair, num_cases, "receiver", Cluster.kill_receiver)


def others_commit_without_a_killed_receiver(pair: RefitPair, num_cases: int) -> None:
    """Killed at a random moment of a refit; a new one is brought to the same version alone."""
    require_surviving(pair)
    _drill(
        pair, num_cases, "receiver", Cluster.kill_receiver_of_some, min_receivers=NUM_RECEIVERS - 1
    )


def staging_receivers_serve_on_if_the_sender_is_killed(pair: RefitPair, num_cases: int) -> None:
    """Killed at a random moment of a staged refit; the old version is ready at every receiver."""
    _drill(pair, num_cases, "sender", Cluster.kill_sender_of_staging, is_staging=True)
