"""Calls on all workers of a vLLM engine, whose errors are answers too.

vLLM takes its workers' answers one by one and leaves off at the first error. The answers behind it
stay, and are taken for those to its next call. So where several workers may fail, as in a refit,
each catches its own error and returns it. This module imports no vLLM.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from rl_refit.errors import RefitError


def refit(llm: Any, version: int) -> list[dict[str, float]]:
    """Receive a version and load it on every worker, while its sender sends it.

    Call it before the sender begins, or soon after: a sender that has failed before is not heard,
    and the workers wait for the next refit until their `timeout_s` is over.

    It counts once the sender, or `rl_refit.vllm.commit` on every worker, has committed it.

    Args:
        llm: A `vllm.LLM` whose `init_weight_transfer_engine` was called.
        version: The version that is sent.

    Returns:
        The metrics of each worker's `RefitReport`.

    Raises:
        RefitError: The refit failed on a worker. The next full one heals all.
        RuntimeError: Not all workers are alive.
    """
    on_workers(llm, start_update)
    on_workers(llm, "update_weights", {"version": version})
    finish_update(llm, version)
    return on_workers(llm, import_module("rl_refit.vllm").last_report)


def finish_update(llm: Any, version: int) -> None:
    """End vLLM's own update, and leave nothing in its cache that other weights have computed.

    Args:
        llm: A `vllm.LLM` whose workers have loaded everything.
        version: The version that they have.

    Raises:
        RefitError: Requests are running, or what was loaded is not all that the model is made of.
    """
    on_workers(llm, "finish_weight_update")
    llm.llm_engine.set_weight_version(str(version))
    if not llm.reset_prefix_cache():
        raise RefitError(
            "requests are running, so vLLM keeps its cache, which other weights have computed"
        )


def on_workers(llm: Any, call: str | Callable[..., Any], *args: Any) -> list[Any]:
    """Return what a call returns on each worker, in the order of their ranks.

    Args:
        llm: A `vllm.LLM`.
        call: A method of vLLM's worker, or a function that takes the worker first.
        args: The call's arguments.

    Raises:
        Exception: What the call raised on the first worker on which it did; where that cannot be
            sent, a `RuntimeError` that tells it in words.
        RuntimeError: Not all workers are alive.
    """
    try:
        attempts: list[Attempt] = llm.collective_rpc(attempt, args=(call, *args))
    except Exception as error:
        # What a call raises is an answer too.
        raise RuntimeError(f"not all of vLLM's workers are alive: {error!r}") from error
    errors = [made.error for made in attempts if made.error is not None]
    if errors:
        raise errors[0]
    return [made.result for made in attempts]


def start_update(worker: Any) -> None:
    """Begin with new weights, whatever became of those before.

    vLLM begins anew only after it has finished. Which workers did differs where some have failed.
    """
    import_module("rl_refit.vllm").abandon(worker)
    if worker._weight_update_active:
        worker.finish_weight_update()
    worker.start_weight_update()


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What came of a call on one worker."""

    result: Any = None
    error: Exception | None = None


def attempt(worker: Any, call: str | Callable[..., Any], *args: Any) -> Attempt:
    """Return what a call returns or raises on a worker; see `on_workers`."""
    try:
        method = getattr(worker, call) if isinstance(call, str) else partial(call, worker)
        return Attempt(result=method(*args))
    except Exception as error:  # whatever it is: `on_workers` raises it
        return Attempt(error=_portable(error))


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # some lack arguments to be made from, some hold what cannot be pickled
        return RuntimeError(repr(error))
    return error
