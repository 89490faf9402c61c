"""Where the time of a refit went."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class RefitReport:
    """One refit, as its sender or one of its receivers saw it.

    The phases overlap, so that they may add up to more than `seconds`.

    Attributes:
        version: The version that was sent.
        seconds: The whole call.
        bytes: Bytes of all tensors.
        pause_s: Waiting until the other side took part.
        gather_s: Waiting for the source's tensors.
        pack_s: Copying them into the buffers.
        wire_s: Publishing buckets and waiting for the other side between them.
        load_s: In the receiver's `load`; at the sender, that of the slowest receiver.
        verify_s: Computing digests; at the sender, its own and those of the slowest receiver.
        resume_s: From the last bucket until every receiver had loaded it.
        slowest_rank: The receiver that spent most time verifying and loading; None without any.
    """

    version: int
    seconds: float
    bytes: int
    pause_s: float = 0.0
    gather_s: float = 0.0
    pack_s: float = 0.0
    wire_s: float = 0.0
    load_s: float = 0.0
    verify_s: float = 0.0
    resume_s: float = 0.0
    slowest_rank: int | None = None

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second of the whole call."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def as_metrics(self) -> dict[str, float]:
        """Return a flat dict for a metrics logger: `refit_s`, `refit_bytes`, `refit_load_s` ..."""
        metrics: dict[str, float] = {
            "refit_s": self.seconds,
            "refit_bytes": self.bytes,
            "refit_gb_per_s": self.gb_per_s,
        }
        metrics |= {
            f"refit_{field.name}": getattr(self, field.name)
            for field in fields(self)
            if field.name.endswith("_s")
        }
        if self.slowest_rank is not None:
            metrics["refit_slowest_rank"] = self.slowest_rank
        return metrics


class Stopwatch:
    """Adds up the seconds spent in each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count the time of the block under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` under `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def total(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._start

    def of(self, name: str) -> float:
        """Return the seconds counted under `name`."""
        return self.seconds.get(name, 0.0)
