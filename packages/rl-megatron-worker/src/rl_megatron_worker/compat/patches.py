"""Attributes of other packages, replaced while somebody needs it and put back afterwards."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

Patch = tuple[Any, str, Any]
"""An object, the name of an attribute that it has itself, and what that is to be."""

_ABSENT = object()


class Patches:
    """A set of replacements that threads enter and leave on their own.

    A thread that is inside may enter again, which does nothing. The attributes are the process's:
    they are replaced for all threads for as long as any thread is inside.

    Args:
        patches: What is replaced. An attribute that is absent is made, and removed again.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches
        self._originals: list[Patch] = []
        self._lock = threading.Lock()
        self._num_threads = 0
        self._thread = threading.local()

    @property
    def entered(self) -> bool:
        """Whether this thread is inside."""
        return getattr(self._thread, "entered", False)

    @contextmanager
    def applied(self) -> Generator[None, None, None]:
        """Replace the attributes inside."""
        if self.entered:
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if self._num_threads == 0:
                for owner, name, replacement in self._patches:
                    self._originals.append((owner, name, vars(owner).get(name, _ABSENT)))
                    setattr(owner, name, replacement)
            self._num_threads += 1
        self._thread.entered = True

    def _leave(self) -> None:
        self._thread.entered = False
        with self._lock:
            self._num_threads -= 1
            while self._num_threads == 0 and self._originals:
                owner, name, original = self._originals.pop()
                if original is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
