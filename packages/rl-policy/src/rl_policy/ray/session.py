"""The Ray under this process's clusters: joined where one runs, started where none does."""

from __future__ import annotations

import logging
import os

import ray

logger = logging.getLogger(__name__)


class RaySession:
    """Who uses the Ray that this process has started, if it has started one.

    A Ray that was running before, or that the program has initialised itself, is joined and left
    as it is. One that was started here ends with the last of its users.
    """

    def __init__(self) -> None:
        self._started = False
        self._users: set[int] = set()

    @property
    def is_local(self) -> bool:
        """Whether Ray runs on this machine alone, as it was started here."""
        return self._started

    def enter(self, user: int, *, num_cpus: int) -> None:
        """Connect to Ray, starting a local one with at least `num_cpus` logical CPUs if need be.

        Args:
            user: What `leave` is going to be called with.
            num_cpus: CPUs that the user is about to reserve. They are logical: a local Ray offers
                them whether or not the machine has as many cores.
        """
        if not ray.is_initialized():
            self._users.clear()
            self._started = _join_or_start(num_cpus)
        if self._started:
            self._users.add(user)

    def leave(self, user: int) -> None:
        """Forget `user`, and end the Ray that was started here when nobody is left."""
        self._users.discard(user)
        if self._started and not self._users:
            self._started = False
            if ray.is_initialized():
                ray.shutdown(wait_for_processes=True)


SESSION = RaySession()
"""Ray is one per process, and so is this."""


def _join_or_start(num_cpus: int) -> bool:
    """Return whether Ray had to be started."""
    num_cpus = max(num_cpus, os.cpu_count() or 1)
    try:
        ray.init(num_cpus=num_cpus, include_dashboard=False, logging_level=logging.ERROR)
    except ValueError as refusal:
        # Ray takes no num_cpus where it finds itself running, and has no public way to look first.
        logger.debug("joining a running Ray: %s", refusal)
        ray.init(logging_level=logging.ERROR)
        return False
    return True
