"""Refits into vLLM: `LLM(..., weight_transfer_config={"backend": "rl_refit"})`.

vLLM imports `register` as a plug-in. Each of its workers is then a receiver:

    llm.init_weight_transfer_engine(init_info(sender.address))
    refit(llm, 3)  # while sender.send(3) runs
    sender.commit(3)
    on_workers(llm, require_ready)  # [3, ...], one per worker

Weights go through vLLM's own layerwise reload, never straight into live parameters. Run with vLLM
0.32. Importing this package does not import vLLM: `engine` and `reload` do, in vLLM's workers.

vLLM reads its workers' answers one by one and stops at the first error; the answers behind it stay
queued, and are taken for those to its next call. So where several workers may fail, as in a refit,
each catches its own error and returns it: call them with `on_workers`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from rl_refit.errors import RefitError

BACKEND = "rl_refit"

__all__ = [
    "BACKEND",
    "abandon",
    "commit",
    "finish_update",
    "init_info",
    "last_report",
    "load",
    "on_workers",
    "refit",
    "register",
    "require_ready",
    "start_update",
]


def register() -> None:
    """Make the weight-transfer engine known to vLLM, which calls this in every process."""
    factory: Any = import_module("vllm.distributed.weight_transfer").WeightTransferEngineFactory
    # vLLM may load its plug-ins more than once in a process, and refuses a second registration.
    if BACKEND not in factory._registry:
        factory.register_engine(BACKEND, "rl_refit.vllm.engine", "RefitWeightTransferEngine")


def init_info(
    address: Mapping[str, str | int], *, rank_offset: int = 0
) -> dict[str, dict[str, Any]]:
    """Return the argument of `LLM.init_weight_transfer_engine`.

    Args:
        address: The `address` of a `RefitSender` for all workers of the engine.
        rank_offset: Added to the workers' ranks, if other engines receive from the same sender.
    """
    return {"init_info": {"address": dict(address), "rank_offset": rank_offset}}


def refit(llm: Any, version: int) -> list[dict[str, float] | None]:
    """Receive a version and load it on every worker, while its sender sends it.

    Call it before the sender begins, or soon after: a sender that has failed before is taken for
    one whose refit was missed, and the workers wait for the next one until their `timeout_s` is
    over. The version counts once the sender, or `commit` on every worker, has committed it.

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
    return on_workers(llm, last_report)


def finish_update(llm: Any, version: int) -> None:
    """Finish vLLM's own update, and drop the prefix cache, which the previous weights computed.

    Args:
        llm: A `vllm.LLM` whose workers have loaded everything.
        version: The version that they have.

    Raises:
        RefitError: Requests are running, or the model has parameters that were not loaded.
    """
    on_workers(llm, "finish_weight_update")
    llm.llm_engine.set_weight_version(str(version))
    if not llm.reset_prefix_cache():
        raise RefitError(
            "requests are running, so that vLLM keeps its prefix cache, which the previous weights "
            "computed: refit when no request runs"
        )


def on_workers(llm: Any, call: str | Callable[..., Any], *args: Any) -> list[Any]:
    """Return what a call returns on each worker, in the order of their ranks.

    Args:
        llm: A `vllm.LLM`.
        call: A method of vLLM's worker, or a function that takes the worker first.
        args: The call's arguments.

    Raises:
        Exception: What the call raised on the first worker on which it did; if that cannot be
            pickled, a `RuntimeError` with its text.
        RuntimeError: Not all workers are alive.
    """
    try:
        attempts: list[Attempt] = llm.collective_rpc(attempt, args=(call, *args))
    except Exception as error:
        # Errors of the call itself are answers, so that this is one of vLLM or a worker.
        raise RuntimeError(f"not all of vLLM's workers are alive: {error!r}") from error
    errors = [made.error for made in attempts if made.error is not None]
    if errors:
        raise errors[0]
    return [made.result for made in attempts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The outcome of a call on one worker."""

    result: Any = None
    error: Exception | None = None


def attempt(worker: Any, call: str | Callable[..., Any], *args: Any) -> Attempt:
    """Return what a call returns or raises on a worker; see `on_workers`."""
    try:
        method = getattr(worker, call) if isinstance(call, str) else partial(call, worker)
        return Attempt(result=method(*args))
    except Exception as error:  # of whatever kind: `on_workers` raises it
        return Attempt(error=_picklable(error))


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # e.g. a constructor with other arguments, or an attribute with a lock
        return RuntimeError(repr(error))
    return error


# What runs on a worker.


def start_update(worker: Any) -> None:
    """Start vLLM's weight update, whatever became of the previous one."""
    abandon(worker)
    # vLLM refuses to start before it has finished; after a failure only some workers have.
    if worker._weight_update_active:
        worker.finish_weight_update()
    worker.start_weight_update()


def require_ready(worker: Any) -> int:
    """Return a worker's committed version: `on_workers(llm, require_ready)`.

    Raises:
        PoisonedError: Its last refit failed.
        RefitInProgress: A refit is not committed yet.
    """
    return worker.weight_transfer_engine.require_receiver().require_ready()


def commit(worker: Any, version: int) -> int:
    """Commit a worker's loaded version: `on_workers(llm, commit, 3)`."""
    receiver = worker.weight_transfer_engine.require_receiver()
    receiver.commit(version)
    return receiver.require_ready()


def load(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load tensors that came another way, between `start_update` and `finish_update`.

    Raises:
        RefitError: No update is open, so that nothing would finish the load.
    """
    if not worker._weight_update_active:
        raise RefitError("load was called outside start_weight_update and finish_weight_update")
    worker.weight_transfer_engine.load(tensors)


def abandon(worker: Any) -> None:
    """Give up a load that was not finished, see `RefitWeightTransferEngine.abandon`."""
    if worker.weight_transfer_engine is not None:
        worker.weight_transfer_engine.abandon()


def last_report(worker: Any) -> dict[str, float] | None:
    """Return the metrics of a worker's last refit."""
    return worker.weight_transfer_engine.report
