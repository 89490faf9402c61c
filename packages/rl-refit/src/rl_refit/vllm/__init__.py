"""Refits into vLLM: `LLM(..., weight_transfer_config={"backend": "rl_refit"})`.

vLLM imports `register` as a plug-in. Each of its workers is then a receiver:

    llm.init_weight_transfer_engine(init_info(sender.address))
    refit(llm, 3)  # while sender.send(3) runs
    sender.commit(3)
    on_workers(llm, require_ready)  # [3, ...], one per worker

Weights go through vLLM's own layerwise reload, never straight into live parameters. Run with vLLM
0.32. Importing this package does not import vLLM: `engine` and `reload` do, in vLLM's workers.

vLLM reads its workers' answers one by one and stops at the first error; the remaining answers stay
queued and are taken for those to its next call. So where several workers may fail, as in a refit,
each worker catches its own error and returns it: `on_workers` makes such calls.
"""

# vLLM has no public name for whether an update is active.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rl_refit.errors import RefitError

if TYPE_CHECKING:
    import torch

    from rl_refit.receiver import RefitReceiver

BACKEND = "rl_refit"

__all__ = [
    "BACKEND",
    "Worker",
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

Result = TypeVar("Result")


class LLMEngine(Protocol):
    """What is used of vLLM's `LLMEngine`."""

    def set_weight_version(self, version: str) -> None:
        """Record the version that vLLM reports with its outputs."""


class LLM(Protocol):
    """What is used of vLLM's `LLM`."""

    llm_engine: LLMEngine

    def collective_rpc(self, method: Callable[..., object], *, args: tuple[object, ...]) -> Any:
        """Call a function on every worker; return the results by rank."""

    def reset_prefix_cache(self) -> bool:
        """Drop the prefix cache; return False if running requests hold it."""
        ...


class TransferEngine(Protocol):
    """What is used of `rl_refit.vllm.engine.RefitWeightTransferEngine`."""

    report: dict[str, float] | None

    def require_receiver(self) -> RefitReceiver:
        """Return the receiver."""
        ...

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load tensors from another source."""

    def abandon(self) -> None:
        """Give up an unfinished load."""


class Worker(Protocol):
    """What is used of vLLM's `Worker`."""

    weight_transfer_engine: TransferEngine | None
    _weight_update_active: bool

    def start_weight_update(self) -> None:
        """Start an update."""

    def finish_weight_update(self) -> None:
        """Finish the update."""


def register() -> None:
    """Make the weight-transfer engine known to vLLM, which calls this in every process."""
    factory = import_module("vllm.distributed.weight_transfer").WeightTransferEngineFactory
    # vLLM may load its plug-ins more than once in a process, and refuses a second registration.
    if BACKEND not in factory._registry:
        factory.register_engine(BACKEND, "rl_refit.vllm.engine", "RefitWeightTransferEngine")


def init_info(
    address: Mapping[str, str | int], *, rank_offset: int = 0
) -> dict[str, dict[str, object]]:
    """Return the argument of `LLM.init_weight_transfer_engine`.

    Args:
        address: The `address` of a `RefitSender` for all workers of the engine.
        rank_offset: Added to the workers' ranks, if other engines receive from the same sender.
    """
    return {"init_info": {"address": dict(address), "rank_offset": rank_offset}}


def refit(llm: LLM, version: int) -> list[dict[str, float] | None]:
    """Receive a version and load it on every worker, while its sender sends it.

    Call it before the sender begins, or soon after. A sender that failed before the call looks like
    one whose refit these workers missed: they then wait for the next refit, up to their
    `timeout_s`. The version counts once it is committed, by the sender or by `commit` on every
    worker.

    Args:
        llm: A `vllm.LLM` whose `init_weight_transfer_engine` was called.
        version: The version that is sent.

    Returns:
        The metrics of each worker's `RefitReport`.

    Raises:
        RefitError: The refit failed on a worker. The next complete one heals all.
        RuntimeError: Not all workers are alive.
    """
    on_workers(llm, start_update)
    on_workers(llm, "update_weights", {"version": version})
    finish_update(llm, version)
    return on_workers(llm, last_report)


def finish_update(llm: LLM, version: int) -> None:
    """Finish vLLM's own update, and drop the prefix cache of the previous weights.

    Args:
        llm: A `vllm.LLM` whose workers have loaded all weights.
        version: The version that they have loaded.

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


def on_workers(llm: LLM, call: str | Callable[..., Result], *args: object) -> list[Result]:
    """Return what a call returns on each worker, in the order of their ranks.

    Args:
        llm: A `vllm.LLM`.
        call: A method of vLLM's worker, or a function that takes the worker first.
        args: The call's arguments.

    Raises:
        Exception: What the call raised on the first worker that failed; if that cannot be pickled,
            a `RuntimeError` with its text.
        RuntimeError: Not all workers are alive.
    """
    try:
        results: list[Result | Raised] = llm.collective_rpc(attempt, args=(call, *args))
    except Exception as error:
        # Errors of the call itself are results, so that this is one of vLLM or a worker.
        raise RuntimeError(f"not all of vLLM's workers are alive: {error!r}") from error
    for result in results:
        if isinstance(result, Raised):
            raise result.error
    return [result for result in results if not isinstance(result, Raised)]


@dataclass(frozen=True, slots=True)
class Raised:
    """The error of a call on one worker, returned in place of a result."""

    error: Exception


def attempt(worker: Worker, call: str | Callable[..., Result], *args: object) -> Result | Raised:
    """Return what a call returns on a worker, or the error that it raises; see `on_workers`."""
    try:
        method = getattr(worker, call) if isinstance(call, str) else partial(call, worker)
        return method(*args)
    except Exception as error:  # of any kind: `on_workers` raises it
        return Raised(_picklable(error))


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # e.g. a constructor with other arguments, or an attribute with a lock
        return RuntimeError(repr(error))
    return error


# The following functions run on a worker.


def start_update(worker: Worker) -> None:
    """Start vLLM's weight update, in whatever state the previous one ended."""
    abandon(worker)
    # vLLM refuses to start before it has finished; after a failure only some workers have.
    if worker._weight_update_active:
        worker.finish_weight_update()
    worker.start_weight_update()


def require_ready(worker: Worker) -> int:
    """Return a worker's committed version: `on_workers(llm, require_ready)`.

    Raises:
        PoisonedError: Its last refit failed.
        RefitInProgress: A refit is not committed yet.
    """
    return _engine(worker).require_receiver().require_ready()


def commit(worker: Worker, version: int) -> int:
    """Commit a worker's loaded version and return it: `on_workers(llm, commit, 3)`."""
    receiver = _engine(worker).require_receiver()
    receiver.commit(version)
    return receiver.require_ready()


def load(worker: Worker, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load tensors from another source, between `start_update` and `finish_update`.

    Raises:
        RefitError: No update is active, so that nothing would finish the load.
    """
    if not worker._weight_update_active:
        raise RefitError("load was called outside start_weight_update and finish_weight_update")
    _engine(worker).load(tensors)


def abandon(worker: Worker) -> None:
    """Give up an unfinished load, see `RefitWeightTransferEngine.abandon`."""
    if worker.weight_transfer_engine is not None:
        worker.weight_transfer_engine.abandon()


def last_report(worker: Worker) -> dict[str, float] | None:
    """Return the metrics of a worker's last refit."""
    return _engine(worker).report


def _engine(worker: Worker) -> TransferEngine:
    if worker.weight_transfer_engine is None:
        raise RefitError(
            "vLLM has no weight-transfer engine: set weight_transfer_config on the LLM"
        )
    return worker.weight_transfer_engine
