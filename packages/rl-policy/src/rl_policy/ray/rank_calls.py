"""Waiting for a call that runs on every rank: all results, or the one failure behind the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import ray
import torch.distributed
from ray.exceptions import RayActorError, RayError, RayTaskError

# How long the other ranks have to fail too, once one has: long enough for Ray to notice the death
# that made a peer's connection break.
GRACE_S = 3.0
# What gloo and NCCL say on the ranks that outlive the one that failed.
_PEER_ERROR = re.compile(r"gloo|nccl|closed by peer|reset by peer|broken pipe", re.IGNORECASE)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class WorkerGroupError(RuntimeError):
    """The ranks cannot be called any more."""


class WorkerDiedError(WorkerGroupError):
    """The process of a rank has ended."""


class RemoteTraceback(Exception):
    """The traceback on the rank, as the cause of what is raised in the driver."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a call on some ranks."""

    results: dict[int, Any] = field(default_factory=dict)
    """What each rank returned."""
    failures: dict[int, Exception] = field(default_factory=dict)
    """What Ray raised for each rank that failed."""
    unfinished: list[int] = field(default_factory=list)
    """Ranks that were still at it when the wait ended."""

    @property
    def is_idle(self) -> bool:
        """Whether every rank is alive and free to take the next call."""
        return not self.unfinished and not any(map(_is_death, self.failures.values()))


def wait_for_ranks(
    refs: Mapping[int, ray.ObjectRef],
    *,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Wait until every rank has answered, one has failed and the rest had time to, or time is up.

    Args:
        refs: What each rank's call is going to return.
        timeout_s: Most seconds to wait. None: as long as every rank is alive.
        grace_s: Seconds that the other ranks have to answer too, once one has failed.
    """
    waiting = {ref: rank for rank, ref in refs.items()}
    deadline = float("inf") if timeout_s is None else monotonic() + timeout_s
    outcome = Outcome()
    while waiting and (left := deadline - monotonic()) > 0:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=min(left, 1.0))
        for ref in ready:
            rank = waiting.pop(ref)
            try:
                outcome.results[rank] = ray.get(ref)
            except Exception as error:  # whatever the worker raised: it is recorded, not judged
                outcome.failures[rank] = error
                deadline = min(deadline, monotonic() + grace_s)
    outcome.unfinished.extend(waiting.values())
    return outcome


def root_failure(outcome: Outcome) -> int:
    """Return the rank whose failure explains the others.

    A death beats an exception, and an exception beats what `torch.distributed` raises on the ranks
    that have lost a peer.
    """
    return min(outcome.failures, key=lambda rank: (_depth(outcome.failures[rank]), rank))


def to_exception(failure: Exception, *, rank: int, group: str, method: str) -> Exception:
    """Return what the driver raises for `failure`: the worker's own exception where there is one.

    Args:
        failure: What Ray raised.
        rank: The rank that failed.
        group: The name of the worker group.
        method: The method that was called.
    """
    where = f"rank {rank} of {group}"
    if _is_death(failure):
        return WorkerDiedError(f"{where} died during {method}: {failure}")
    cause = failure.cause if isinstance(failure, RayTaskError) else None
    if not isinstance(cause, Exception) or isinstance(cause, RayError):
        # The worker's exception could not be pickled: its text is what is left of it.
        return WorkerGroupError(f"{where} failed during {method}: {failure}")
    cause.__cause__ = RemoteTraceback(_COLOR.sub("", str(failure)))
    cause.add_note(f"raised on {where} during {method}")
    return cause


def _is_death(failure: Exception) -> bool:
    return isinstance(failure, RayActorError)


def _depth(failure: Exception) -> int:
    if _is_death(failure):
        return 0
    cause = failure.cause if isinstance(failure, RayTaskError) else failure
    if isinstance(cause, torch.distributed.DistError):
        return 2
    is_peer_error = isinstance(cause, RuntimeError) and _PEER_ERROR.search(str(cause))
    return 2 if is_peer_error else 1
