"""Refits into vLLM: `LLM(..., weight_transfer_config={"backend": "rl_refit"})`.

vLLM imports `register` as a plug-in. Each of its workers is then a receiver:

    llm.init_weight_transfer_engine(init_info(sender.address))
    refit(llm, 3)  # while sender.send(3) runs
    sender.commit(3)
    on_workers(llm, require_ready)  # [3, ...], one per worker

An LLM with `enable_lora` takes adapters apart from the weights that they belong to, if the sender
has `adapters`. Every request then names them:

    on_workers(llm, start_adapters)
    refit(llm, 3)  # while sender.send(3) runs
    llm.generate(prompts, lora_request=LoRARequest("policy", ADAPTER_ID, "refit"))
    refit(llm, 4)  # while sender.send(4, adapters_only=True) runs

While requests run, a version can be received beside the weights that serve:

    stage(llm, 4)  # returns at once: sender.send(4) runs while llm generates
    while not is_staged(llm): llm.llm_engine.step()
    flip(llm, 4)  # between two steps
    sender.commit(4)

The sender may be a `rl_refit.resharding.ReshardSender`: each worker then receives the slices that
it consumes. The calls are the same.

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
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from rl_refit.errors import RefitError

if TYPE_CHECKING:
    import torch

    from rl_refit.receiver import RefitReceiver
    from rl_refit.vllm.staging import Room

BACKEND = "rl_refit"
ADAPTER_ID = 1
"""vLLM's `lora_int_id` of the adapter that refits replace."""
KvCache = Literal["drop", "keep"]
"""What becomes of the key-value cache when weights change under running requests."""

__all__ = [
    "ADAPTER_ID",
    "BACKEND",
    "KvCache",
    "Worker",
    "abandon",
    "abandon_staging",
    "commit",
    "find_room",
    "finish_update",
    "flip",
    "forget_base",
    "holds_base",
    "init_info",
    "is_staged",
    "last_report",
    "load",
    "on_workers",
    "refit",
    "register",
    "release_staging",
    "require_ready",
    "stage",
    "start_adapters",
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

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drop the prefix cache; return False if running requests hold it.

        Args:
            reset_running_requests: Make them compute their cache again.
        """
        ...


class TransferEngine(Protocol):
    """What is used of `rl_refit.vllm.engine.RefitWeightTransferEngine`."""

    report: dict[str, float] | None

    def require_receiver(self) -> RefitReceiver:
        """Return the receiver."""
        ...

    def find_room(self, *, only_host: bool) -> Room:
        """Return where a second set of weights can be held."""
        ...

    def stage(self, version: int, place: str) -> None:
        """Start to receive a version beside the weights that serve."""

    def staged(self) -> bool:
        """Return whether that version is complete."""
        ...

    def abandon_staging(self) -> None:
        """Give up that version."""

    def holds_base(self) -> bool:
        """Return whether adapters alone can be received."""
        ...

    def forget_base(self) -> None:
        """Ask for the base once more."""

    def start_adapters(self) -> None:
        """Serve an adapter of zeros, which refits replace."""

    def restore_adapters(self) -> None:
        """Serve the adapter that was received last, if there is any."""

    def release_staging(self) -> None:
        """Free the second set of weights."""

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
    # vLLM drops all adapters when an update is finished.
    on_workers(llm, _restore_adapters)
    llm.llm_engine.set_weight_version(str(version))
    if not llm.reset_prefix_cache():
        raise RefitError(
            "requests are running, so that vLLM keeps its prefix cache, which the previous weights "
            "computed: refit when no request runs"
        )


def find_room(llm: LLM, *, only_host: bool = False) -> tuple[str | None, str]:
    """Return where every worker can hold a second set of weights: "device", "host" or None.

    Args:
        llm: A `vllm.LLM`.
        only_host: Leave the devices' memory alone.

    Returns:
        The place, and why there is none.
    """
    rooms = on_workers(llm, _find_room, only_host)
    for room in rooms:
        if room.place is None:
            return None, room.reason
    places = {room.place for room in rooms}
    return ("host" if "host" in places else "device"), ""


def stage(llm: LLM, version: int, *, place: str) -> None:
    """Start to receive a version on every worker beside the weights that serve, and return.

    Call it before the sender begins, see `refit`. Requests may run meanwhile. A transfer that fails
    leaves the committed version as it is.

    Args:
        llm: A `vllm.LLM` whose `init_weight_transfer_engine` was called.
        version: The version that is sent.
        place: Of `find_room`.

    Raises:
        StaleVersionError: The version is not newer than the committed one; nothing changes.
        RefitError: Another version is still being received.
        RuntimeError: Not all workers are alive.
    """
    try:
        on_workers(llm, _stage, version, place)
    except Exception:
        on_workers(llm, abandon_staging)
        raise


def is_staged(llm: LLM) -> bool:
    """Return whether every worker holds all of the version of `stage`.

    Raises:
        RefitError: The refit failed on a worker. The committed version still serves.
    """
    return all(on_workers(llm, _staged))


def flip(llm: LLM, version: int, *, kv_cache: KvCache = "drop") -> None:
    """Exchange the weights that serve with the staged ones, between two steps of the scheduler.

    Args:
        llm: A `vllm.LLM` for which `is_staged` is true; no step of it may run.
        version: Of the staged weights; vLLM labels the tokens of later steps with it.
        kv_cache: "drop": running requests go on as if the new weights had computed everything from
            the prompt on, which takes a prefill of each. "keep": they go on at once, on keys and
            values of the earlier weights. Cached prefixes of finished requests may then be found
            too: give the requests of each version a `cache_salt` of its own.

    Raises:
        RefitError: The version is not staged.
    """
    on_workers(llm, commit, version)
    llm.llm_engine.set_weight_version(str(version))
    if kv_cache == "drop":
        llm.reset_prefix_cache(reset_running_requests=True)


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


def abandon_staging(worker: Worker) -> None:
    """Give up a version that is being received beside the weights that serve; these stay."""
    _engine(worker).abandon_staging()


def release_staging(worker: Worker) -> None:
    """Free the memory of a worker's second set of weights."""
    _engine(worker).release_staging()


def start_adapters(worker: Worker) -> None:
    """Serve an adapter of zeros as `ADAPTER_ID`, which refits replace by the sender's.

    For every worker of an LLM with `enable_lora`, before the first request that names the adapter.

    Raises:
        RefitError: The engine takes no adapters.
    """
    _engine(worker).start_adapters()


def _restore_adapters(worker: Worker) -> None:
    if worker.weight_transfer_engine is not None:
        worker.weight_transfer_engine.restore_adapters()


def holds_base(worker: Worker) -> bool:
    """Return whether a worker holds the sender's base, so that adapters alone can be sent."""
    return _engine(worker).holds_base()


def forget_base(worker: Worker) -> None:
    """Ask for the base once more, if a worker has lost its weights."""
    _engine(worker).forget_base()


def _find_room(worker: Worker, only_host: bool) -> Room:
    return _engine(worker).find_room(only_host=only_host)


def _stage(worker: Worker, version: int, place: str) -> None:
    _engine(worker).stage(version, place)


def _staged(worker: Worker) -> bool:
    return _engine(worker).staged()


def last_report(worker: Worker) -> dict[str, float] | None:
    """Return the metrics of a worker's last refit."""
    return _engine(worker).report


def _engine(worker: Worker) -> TransferEngine:
    if worker.weight_transfer_engine is None:
        raise RefitError(
            "vLLM has no weight-transfer engine: set weight_transfer_config on the LLM"
        )
    return worker.weight_transfer_engine
