"""What becomes of a call on all ranks: their results, or the one failure that explains the others.

wait_for_ranks --> Outcome --root_failure--> a rank --to_exception--> what the driver raises
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import ray
import torch.distributed
from ray.exceptions import RayActorError, RayError, RayTaskError

# How long the other ranks have to fail too, once one has: long enough for Ray to notice the death
# that made a peer's connection break.
GRACE_S = 3.0
# How much later than the first a rank may finish to be taken with it.
_TOGETHER_S = 0.01
# The errors of gloo and NCCL on the ranks that outlive the one that failed.
_PEER_ERROR = re.compile(r"gloo|nccl|closed by peer|reset by peer|broken pipe", re.IGNORECASE)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class RayStartError(RuntimeError):
    """No Ray could be started or joined; says what was tried, for how long, and what to do."""


class WorkerGroupError(RuntimeError):
    """The ranks cannot be called any more."""


class WorkerDiedError(WorkerGroupError):
    """The process of a rank has ended.

    Attributes:
        summary: Which rank, and in which call; one line.
        reason: What is known of its end; one line.
    """

    def __init__(self, summary: str, *, reason: str, details: str) -> None:
        super().__init__(f"{summary}: {details}")
        self.summary = summary
        self.reason = reason


def death_behind(error: BaseException) -> WorkerDiedError | None:
    """Return the death of a rank that an exception was raised for, or while handling; else None."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, WorkerDiedError):
        seen = seen.__cause__ or seen.__context__
    return seen


class RemoteTraceback(Exception):
    """The traceback on the rank, as the cause of the exception that the driver raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The results and failures of a call."""

    results: dict[int, Any] = field(default_factory=dict)
    """What each rank returned."""
    failures: dict[int, Exception] = field(default_factory=dict)
    """What Ray raised for each rank that failed."""
    unfinished: list[int] = field(default_factory=list)
    """Ranks that were still running when the wait ended."""

    @property
    def is_idle(self) -> bool:
        """Whether every rank is alive and can take the next call."""
        return not self.unfinished and not any(map(_is_death, self.failures.values()))


def wait_for_ranks(
    refs: Sequence[ray.ObjectRef],
    ranks: Sequence[int] | None = None,
    *,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Wait until all ranks have finished, or for `grace_s` after the first failure.

    Args:
        refs: The future of each rank's call, in rank order.
        ranks: The rank of each of them. None: 0, 1, ...
        timeout_s: Limit in seconds. None: as long as every rank is alive.
        grace_s: Seconds that the other ranks have to finish once one has failed.
    """
    waiting = dict(zip(refs, range(len(refs)) if ranks is None else ranks, strict=True))
    deadline = float("inf") if timeout_s is None else monotonic() + timeout_s
    outcome = Outcome()
    while waiting and (left := deadline - monotonic()) > 0:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=min(left, 1.0))
        if ready and len(waiting) > 1:
            # Those that finish together are taken together: one by one would be quadratic in ranks.
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=_TOGETHER_S)
        failed_before = len(outcome.failures)
        _take(ready, waiting, outcome)
        if len(outcome.failures) > failed_before:
            deadline = min(deadline, monotonic() + grace_s)
    outcome.unfinished.extend(waiting.values())
    return outcome


def _take(ready: list[ray.ObjectRef], waiting: dict[ray.ObjectRef, int], outcome: Outcome) -> None:
    """Move what has finished from `waiting` to the outcome."""
    ranks = [waiting.pop(ref) for ref in ready]
    try:
        results = ray.get(ready)
    except Exception:  # of one of them, which is found one by one
        for rank, ref in zip(ranks, ready, strict=True):
            try:
                outcome.results[rank] = ray.get(ref)
            except Exception as error:  # any: `root_failure` decides which of them is raised
                outcome.failures[rank] = error
    else:
        outcome.results.update(zip(ranks, results, strict=True))


def root_failure(outcome: Outcome) -> int:
    """Return the rank whose failure explains the others.

    The death of a process precedes an exception, and an exception precedes the errors that
    `torch.distributed` raises on ranks that have lost a peer.
    """
    return min(outcome.failures, key=lambda rank: (_depth(outcome.failures[rank]), rank))


def to_exception(failure: Exception, *, rank: int, group: str, method: str) -> Exception:
    """Return the exception that the driver raises: the worker's own if there is one.

    Args:
        failure: What Ray raised.
        rank: The rank that failed.
        group: The name of the worker group.
        method: The method that was called.
    """
    where = f"rank {rank} of {group}"
    if _is_death(failure):
        return WorkerDiedError(
            f"{where} died during {method}", reason=_reason(str(failure)), details=str(failure)
        )
    cause = failure.cause if isinstance(failure, RayTaskError) else None
    if not isinstance(cause, Exception) or isinstance(cause, RayError):
        # The worker's exception could not be pickled, and only its text has arrived.
        return WorkerGroupError(f"{where} failed during {method}: {failure}")
    cause.__cause__ = RemoteTraceback(_COLOR.sub("", str(failure)))
    cause.add_note(f"raised on {where} during {method}")
    return cause


def _reason(text: str) -> str:
    """Return what Ray's report of a process's end says, in one line."""
    lines = [line.strip() for line in _COLOR.sub("", text).splitlines() if line.strip()]
    memory = next((line for line in lines if "memory" in line and "%" in line), None)
    if memory is not None:
        return f"Ray's memory monitor killed it: {memory[:300]}"
    if "End of file" in text:
        # What a raylet sees of SIGKILL, whoever has sent it.
        available, total = (
            os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") / 2**30
            for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
        )
        return (
            "its process was killed, or crashed: it has left no exit status; "
            f"{available:.1f} of {total:.1f} GiB of this machine's memory are free now"
        )
    return " ".join(lines)[:300]


def _is_death(failure: Exception) -> bool:
    return isinstance(failure, RayActorError)


def _depth(failure: Exception) -> int:
    if _is_death(failure):
        return 0
    cause = failure.cause if isinstance(failure, RayTaskError) else failure
    # torch's errors of a collective on this rank are mostly the consequence of a lost peer.
    if isinstance(cause, torch.distributed.DistError):
        return 2
    is_peer_error = isinstance(cause, RuntimeError) and _PEER_ERROR.search(str(cause))
    return 2 if is_peer_error else 1
