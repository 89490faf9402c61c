"""Measured durations: a stopwatch over named phases, and the report of one refit."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import NamedTuple


class Span(NamedTuple):
    """When a phase of a refit began and ended, in seconds of this machine's `time.perf_counter`."""

    phase: str
    """`gather`, `pack`, `wire`, `verify`, `load`, `join` or `resume`, see `RefitReport`."""
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class RefitReport:
    """The durations of one refit, measured by its sender or by one of its receivers.

    The phases overlap: they may add up to more than `seconds`.

    Attributes:
        version: The version that was sent.
        seconds: Duration of the call.
        bytes: Size of all tensors.
        bytes_sent: What was sent to each receiver in place of them: less where only changes were.
        changed: Share of the 16-bit words that have changed since the refit before, which is that
            of the elements of bfloat16 tensors; None if everything was sent in full.
        pause_s: In which the engine did not answer. Without staging, from the beginning of the
            refit to this report; with it, none: what the swap takes is known after the commit.
        join_s: Waiting until the other side had joined the refit.
        gather_s: Waiting for the source's tensors.
        pack_s: Copying them into the buffers.
        wire_s: Publishing buckets, and waiting for the other side between them.
        load_s: In the receiver's `load`; for a sender, that of the slowest receiver.
        verify_s: Computing digests; for a sender, its own and those of the slowest receiver.
        resume_s: From the last bucket until every receiver had loaded it.
        slowest_rank: The receiver that verified and loaded longest; None without receivers.
        staged: Whether the weights were received beside those that the engine serves; for a sender,
            by every receiver.
        dropped: For a sender with `min_receivers`: the receivers without which the version was
            sent, with the reason of each.
        spans: When each phase ran, in order of their ends, if the sender or receiver that measured
            it was made with `keep_spans`; else empty.
    """

    version: int
    seconds: float
    bytes: int
    bytes_sent: int = 0
    changed: float | None = None
    pause_s: float = 0.0
    join_s: float = 0.0
    gather_s: float = 0.0
    pack_s: float = 0.0
    wire_s: float = 0.0
    load_s: float = 0.0
    verify_s: float = 0.0
    resume_s: float = 0.0
    slowest_rank: int | None = None
    staged: bool = False
    dropped: Mapping[int, str] = field(default_factory=dict[int, str])
    spans: tuple[Span, ...] = ()

    @property
    def gb_per_s(self) -> float:
        """Throughput of the call, in 10^9 bytes per second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def as_metrics(self) -> dict[str, float]:
        """Return a flat dict for a metrics logger: `refit_s`, `refit_bytes`, `refit_load_s` ..."""
        metrics: dict[str, float] = {
            "refit_s": self.seconds,
            "refit_bytes": self.bytes,
            "refit_bytes_sent": self.bytes_sent,
            "refit_gb_per_s": self.gb_per_s,
            "refit_staged": float(self.staged),
            "refit_dropped": len(self.dropped),
        }
        metrics |= {
            f"refit_{each.name}": getattr(self, each.name)
            for each in fields(self)
            if each.name.endswith("_s")
        }
        if self.changed is not None:
            metrics["refit_changed"] = self.changed
        if self.slowest_rank is not None:
            metrics["refit_slowest_rank"] = self.slowest_rank
        return metrics


@dataclass(slots=True)
class Traffic:
    """Counts what one refit sends to each receiver.

    Attributes:
        bytes_sent: Of buckets and patches.
        num_words: 16-bit words that were compared; 0 where everything is sent in full.
        num_changed: Those of them that had changed.
    """

    bytes_sent: int = 0
    num_words: int = 0
    num_changed: int = 0

    @property
    def changed(self) -> float | None:
        """The share of words that had changed; None if none were compared."""
        return self.num_changed / self.num_words if self.num_words else None


class Stopwatch:
    """Sums the seconds spent in each named phase; its construction starts the total.

    Args:
        keep_spans: Also keep when each phase began and ended.

    Attributes:
        seconds: Sum per phase.
    """

    def __init__(self, *, keep_spans: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._spans: list[Span] | None = [] if keep_spans else None
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count the time of the block under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.add(name, end - start)
            if self._spans is not None:
                self._spans.append(Span(name, start, end))

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` under `name`."""
        self.seconds[name] = self.of(name) + seconds

    def of(self, name: str) -> float:
        """Return the seconds counted under `name`."""
        return self.seconds.get(name, 0.0)

    def report(
        self,
        version: int,
        num_bytes: int,
        *,
        traffic: Traffic | None = None,
        slowest_rank: int | None = None,
        staged: bool = False,
        dropped: Mapping[int, str] | None = None,
    ) -> RefitReport:
        """Return the report of a refit that ends now.

        Args:
            version: The version that was sent.
            num_bytes: Of all tensors.
            traffic: What was sent; None without receivers.
            slowest_rank: See `RefitReport`.
            staged: See `RefitReport`.
            dropped: See `RefitReport`; None for none.
        """
        phases = ("pause", "join", "gather", "pack", "wire", "load", "verify", "resume")
        traffic = traffic or Traffic()
        return RefitReport(
            version=version,
            seconds=time.perf_counter() - self._start,
            bytes=num_bytes,
            bytes_sent=traffic.bytes_sent,
            changed=traffic.changed,
            slowest_rank=slowest_rank,
            staged=staged,
            dropped=dict(dropped or {}),
            spans=tuple(self._spans or ()),
            **{f"{phase}_s": self.of(phase) for phase in phases},
        )
