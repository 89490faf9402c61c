"""One time limit for a whole call, however many waits it has."""

from __future__ import annotations

import time

from rl_refit.errors import RefitTimeoutError


class Deadline:
    """A moment after which every wait fails."""

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"timeout_s={seconds} is not positive")
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def extended(self, seconds: float) -> Deadline:
        """Return a deadline that is not before `seconds` from now: what is there can be read."""
        return Deadline(max(self._end - time.monotonic(), seconds))

    def remaining(
        self,
        waited_for: str,
        *,
        rank: int | None = None,
        bucket: int | None = None,
        tensor: str | None = None,
    ) -> float:
        """Return the seconds that are left.

        Raises:
            RefitTimeoutError: None is left; the message says what was waited for.
        """
        left = self._end - time.monotonic()
        if left > 0:
            return left
        message = f"no {waited_for} within {self.seconds:g} s"
        raise RefitTimeoutError(message, rank=rank, bucket=bucket, tensor=tensor)
