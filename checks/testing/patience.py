"""How long tests wait: every wait of a test is one of these, generous on a busy machine."""

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

PATIENCE_S = 900.0
"""Limit of a wait for something that must happen, and of a product's call that must succeed.

It equals pytest's own limit of a test, `timeout` in the root `pyproject.toml`, so that no wait
decides a result: pytest ends a test that hangs and prints the stacks of all its processes, see
`stacks`.
"""
_POLL_S = 0.02


def wait_until(condition: Callable[[], Result], *, what: str) -> Result:
    """Wait until `condition()` is true, and return what it gave; fail if it never is.

    Args:
        condition: Called again and again.
        what: What is waited for, for the message of the failure.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(_POLL_S)
    return value
