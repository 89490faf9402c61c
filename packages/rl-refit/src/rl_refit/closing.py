"""Objects that let go of what they hold at the end of a `with` block."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Self


class Closing(AbstractContextManager["Closing"]):
    """Closes itself at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
