"""Waiting for another process that is about to answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

LOOKING_S = 0.001
Found = TypeVar("Found")


def look_first(look: Callable[[], Found]) -> Found:
    """Return what `look` finds within a millisecond, or the nothing that it found last.

    To be called before one sleeps. The kernel tends to wake a sleeper on the processor of the one
    that wrote to its socket, so that two sides that sleep by turns work one after the other,
    whatever processors are free.
    """
    end = time.perf_counter() + LOOKING_S
    while not (found := look()) and time.perf_counter() < end:
        os.sched_yield()
    return found
