"""The requests that run in an engine: of `generate`, of submissions, and of a server's clients.

    _enqueue --add--> [ step, step, ... ] --outputs--> Future of each batch
    EngineClient ----> one turn each        finished out of order --> next_finished
                                            of clients: each output, as it comes

One loop steps for all of them, as vLLM batches whatever runs. A step is a turn of the engine's
thread, and asks for the next one when it ends: a call that came meanwhile runs in between.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_policy.generation.state import EngineStateError
from rl_policy.generation.vllm.engine.turns import EngineThread
from rl_policy.generation.vllm.requests import Completion, assemble_output, versions_of

if TYPE_CHECKING:
    from rl_batched_data import BatchedDataDict
    from rl_interfaces import FinishReason, GenerationOutputSpec

logger = logging.getLogger(__name__)

Outputs: TypeAlias = list[Any]
"""vLLM's `RequestOutput` of each request of a batch, in the order in which they were added."""


@dataclass(slots=True)
class _Batch:
    names: list[str]
    outputs: dict[str, Any] = field(default_factory=dict)

    @property
    def running(self) -> list[str]:
        return [name for name in self.names if _public(name) not in self.outputs]


@dataclass(frozen=True, slots=True)
class _Stream:
    internal: str
    """vLLM's own name of the request."""
    deliver: Callable[[Any], None]


class RequestLoop:
    """Steps an engine as long as requests run.

    All methods are called in the engine's thread, but `wait_idle`, `is_idle`, `hold`, `release`,
    `holding`, `waking` and `wake_clients`.

    Args:
        thread: The engine's.
        step: Runs one step of the scheduler; returns its outputs.
        abort: Frees running requests, by the names that `add` was given.
    """

    def __init__(
        self,
        thread: EngineThread,
        *,
        step: Callable[[], Outputs],
        abort: Callable[[Sequence[str]], None],
    ) -> None:
        self._thread = thread
        self._step = step
        self._abort = abort
        self._batches: dict[Future[Outputs], _Batch] = {}
        self._owners: dict[str, Future[Outputs]] = {}
        self._streams: dict[str, _Stream] = {}
        self._num_holds = 0
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        self._idle = threading.Event()
        self._idle.set()

    @property
    def is_idle(self) -> bool:
        """Whether no request runs."""
        return self._idle.is_set()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs; return False if some still do after `timeout_s`."""
        return self._idle.wait(timeout_s)

    def add(self, names: Sequence[str]) -> Future[Outputs]:
        """Step until the requests have finished.

        Args:
            names: vLLM's names of requests that were added to its scheduler.

        Returns:
            Their outputs. If a step fails, its error.
        """
        batch: Future[Outputs] = Future()
        if not names:
            batch.set_result([])
            return batch
        self._batches[batch] = _Batch([*names])
        self._owners |= {_public(name): batch for name in names}
        self._wake()
        return batch

    def _wake(self) -> None:
        if self._idle.is_set():
            self._idle.clear()
            self._thread.post(self._turn)

    def cancel(self, batch: Future[Outputs]) -> None:
        """Abort what still runs of a batch; do nothing if it has ended."""
        if batch in self._batches:
            running = self._forget(batch)
            batch.cancel()
            self._abort(running)

    def add_stream(self, name: str, *, internal: str, deliver: Callable[[Any], None]) -> None:
        """Step until a request of a client has finished.

        Args:
            name: Of the request, which its outputs have.
            internal: vLLM's own name of it.
            deliver: Gets each output of it, or the error of a step.
        """
        self._streams[name] = _Stream(internal, deliver)
        self._wake()

    def cancel_stream(self, name: str) -> None:
        """Abort a request of a client; do nothing if it has ended."""
        stream = self._streams.pop(name, None)
        if stream is not None:
            self._abort([stream.internal])

    @property
    def num_streams(self) -> int:
        """Requests of clients that run."""
        return len(self._streams)

    def hold(self) -> None:
        """Have clients' requests wait, so that those that run come to an end."""
        with self._lock:
            self._num_holds += 1

    def release(self) -> None:
        """Undo `hold`."""
        with self._lock:
            self._num_holds -= 1
        self.wake_clients()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Have clients' requests wait inside, see `hold`."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` inside whenever the engine may sample again for clients that wait.

        It is called in any thread, and must return at once.
        """
        with self._lock:
            self._wakers.append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._wakers.remove(wake)

    def wake_clients(self) -> None:
        """Let clients' requests that wait try again: the engine's state has changed."""
        with self._lock:
            wakers = [*self._wakers]
        for wake in wakers:
            wake()

    def require_open(self) -> None:
        """Raise `EngineStateError` if clients' requests have to wait."""
        if self._num_holds:
            raise EngineStateError("the engine waits for its requests to end")

    def fail(self, error: BaseException) -> None:
        """End all batches, and all requests of clients, with an error."""
        batches = [*self._batches]
        running = [name for batch in batches for name in self._forget(batch)]
        streams = [*self._streams.values()]
        self._streams.clear()
        running += [stream.internal for stream in streams]
        try:
            self._abort(running)
        except Exception as theirs:  # of an engine that is broken anyway: `error` is the reason
            error.add_note(f"requests could not be aborted: {type(theirs).__name__}: {theirs}")
        for batch in batches:
            batch.set_exception(error)
        for stream in streams:
            try:
                stream.deliver(error)
            except Exception:  # of one client, whose end the others must not wait for
                logger.exception("%s: a client did not take the failure", stream.internal)

    def _turn(self) -> None:
        """Run a step, and ask for the next one."""
        if self._batches or self._streams:
            try:
                for output in self._step():
                    self._deliver(output)
            except BaseException as error:  # nobody waits for this turn itself
                self.fail(error)
        if self._batches or self._streams:
            self._thread.post(self._turn)
        else:
            self._idle.set()

    def _deliver(self, output: Any) -> None:
        stream = self._streams.get(output.request_id)
        if stream is not None:
            if output.finished:
                del self._streams[output.request_id]
            stream.deliver(output)
            return
        if not output.finished:
            return
        # One that was cancelled may still come out of a step that was scheduled before.
        future = self._owners.pop(output.request_id, None)
        if future is None:
            return
        batch = self._batches[future]
        batch.outputs[output.request_id] = output
        if len(batch.outputs) == len(batch.names):
            del self._batches[future]
            future.set_result([batch.outputs[_public(name)] for name in batch.names])

    def _forget(self, batch: Future[Outputs]) -> list[str]:
        """Return the names of a batch's running requests, which belong to nobody from now on."""
        running = self._batches.pop(batch).running
        for name in running:
            del self._owners[_public(name)]
        return running


@dataclass(frozen=True, slots=True)
class Submission:
    """A batch whose caller does not wait."""

    key: int
    """The caller's name of it."""
    prompts: list[list[int]]
    """The tokens of each row."""
    _: KW_ONLY
    pad_token_id: int
    """Pads the output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedSubmission:
    """A submission that has ended in one way or another."""

    key: int
    """The caller's name of it."""
    output: BatchedDataDict[GenerationOutputSpec] | None = None
    """See `assemble_output`; None if it failed."""
    finish_reasons: tuple[FinishReason, ...] = ()
    """Of each row."""
    error: str = ""
    """Why it failed."""


class Submissions:
    """Batches whose callers do not wait; what has ended is handed out once.

    `add` and `batch` are called in the engine's thread, `next_ended` in another.
    """

    def __init__(self) -> None:
        self._running: dict[int, Future[Outputs]] = {}
        self._ended: SimpleQueue[tuple[Submission, Future[Outputs]]] = SimpleQueue()

    def add(self, submission: Submission, batch: Future[Outputs]) -> None:
        """Hand a batch out when it has ended, unless it was cancelled."""
        self._running[submission.key] = batch

        def end(batch: Future[Outputs]) -> None:
            del self._running[submission.key]
            if not batch.cancelled():
                self._ended.put((submission, batch))

        batch.add_done_callback(end)

    def batch(self, key: int) -> Future[Outputs] | None:
        """Return a batch that runs; None if it has ended."""
        return self._running.get(key)

    def next_ended(self, timeout_s: float) -> list[EndedSubmission]:
        """Wait until one has ended; return all that have, or none after `timeout_s`."""
        ended: list[EndedSubmission] = []
        try:
            ended.append(_result(*self._ended.get(timeout=timeout_s)))
            while True:
                ended.append(_result(*self._ended.get_nowait()))
        except Empty:
            return ended


def completions_of(outputs: Outputs) -> list[Completion]:
    """Return the completion of each request."""
    entries = [output.outputs[0] for output in outputs]
    for entry in entries:
        assert len(entry.logprobs.logprobs) == len(entry.token_ids)
    return [
        Completion(
            token_ids=entry.token_ids,
            logprobs=entry.logprobs.logprobs,
            weight_versions=versions_of(entry.weight_versions),
            finish_reason=entry.finish_reason,
            routed_experts=entry.routed_experts,
        )
        for entry in entries
    ]


def _result(submission: Submission, batch: Future[Outputs]) -> EndedSubmission:
    error = batch.exception()
    if error is not None:
        # As text: not every error of vLLM can be pickled.
        return EndedSubmission(key=submission.key, error=f"{type(error).__name__}: {error}")
    completions = completions_of(batch.result())
    return EndedSubmission(
        key=submission.key,
        output=assemble_output(
            submission.prompts, completions, pad_token_id=submission.pad_token_id
        ),
        finish_reasons=tuple(each.finish_reason for each in completions),
    )


def _public(name: str) -> str:
    """Return the name that a request's output has: vLLM adds random characters for itself."""
    return name.partition("-")[0]
