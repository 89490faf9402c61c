"""The one thread in which an engine runs, and in which calls take turns with its steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class EngineThread:
    """Runs calls one by one, in the order in which they were made by any thread.

    vLLM's engine in this process belongs to one thread: its generation is a loop of steps, each of
    which is a call of its own, so that a call of another thread runs between two of them. It waits
    for one step, however many requests run.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-engine")

    def run(
        self,
        call: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Return what `call` returns in the engine's thread, or raise its error."""
        return self._pool.submit(call, *args, **kwargs).result()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` after those that were made before, without waiting for it.

        Its errors are lost: it handles them itself.
        """
        self._pool.submit(call)

    def close(self) -> None:
        """End the thread after the calls that were made. May be called again."""
        self._pool.shutdown()


class HasEngineThread(Protocol):
    """Owns an engine that runs in a thread of its own."""

    _thread: EngineThread


def in_turn(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Make a method of the owner of an `EngineThread` run there, between two steps."""

    @wraps(method)
    def call(owner: HasEngineThread, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return owner._thread.run(method, owner, *args, **kwargs)  # pyright: ignore[reportPrivateUsage]

    return call
