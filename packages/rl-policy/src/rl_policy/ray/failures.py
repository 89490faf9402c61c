"""The failures of a call on all ranks: the one that explains the others, as an exception.

failures --root_failure--> a rank --to_exception--> what the driver raises
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch.distributed
from ray.exceptions import RayActorError, RayError, RayTaskError

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


def root_failure(failures: Mapping[int, Exception]) -> int:
    """Return the rank whose failure explains those of the others.

    The death of a process precedes an exception, and an exception precedes the errors that
    `torch.distributed` raises on ranks that have lost a peer.
    """
    return min(failures, key=lambda rank: (_depth(failures[rank]), rank))


def to_exception(failure: Exception, *, rank: int, group: str, method: str) -> Exception:
    """Return the exception that the driver raises: the worker's own if there is one.

    Args:
        failure: What Ray raised.
        rank: The rank that failed.
        group: The name of the worker group.
        method: The method that was called.
    """
    where = f"rank {rank} of {group}"
    if is_death(failure):
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


def is_death(failure: Exception) -> bool:
    """Return whether the process of a rank has ended."""
    return isinstance(failure, RayActorError)


def _depth(failure: Exception) -> int:
    if is_death(failure):
        return 0
    cause = failure.cause if isinstance(failure, RayTaskError) else failure
    # torch's errors of a collective on this rank are mostly the consequence of a lost peer.
    if isinstance(cause, torch.distributed.DistError):
        return 2
    is_peer_error = isinstance(cause, RuntimeError) and _PEER_ERROR.search(str(cause))
    return 2 if is_peer_error else 1
