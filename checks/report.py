"""The table at the end of a run of nox: what each session tested, what it skipped, and its log."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import nox

from checks.workspace import ROOT

RESULTS = ROOT / ".nox" / "results"


@dataclass(frozen=True)
class SessionResult:
    """What one session did.

    Attributes:
        name: The name of the session, as nox lists it.
        outcome: `"passed"`, `"failed"` or `"skipped"`.
        minutes: Wall-clock minutes.
        processor_minutes: Processor minutes of the processes that the session started and waited
            for.
        tests: The number of tests by outcome, if the session ran pytest.
        skipped: The number of skipped tests by reason.
    """

    name: str
    outcome: str
    minutes: float
    processor_minutes: float
    tests: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)


def recorded(function: Callable[..., None]) -> Callable[..., None]:
    """Return a session that records its result, and its output in a log if others run as well."""

    @functools.wraps(function)
    def session_of(session: nox.Session, *arguments: Any, **parameters: Any) -> None:
        start, before = time.monotonic(), processor_seconds()
        for old in RESULTS.glob(f"{file_stem(session.name)}.*"):
            old.unlink()
        outcome = "failed"
        try:
            with logged(session):
                function(session, *arguments, **parameters)
            outcome = "passed"
        except BaseException as error:
            # nox raises a private class for `session.skip`.
            if type(error).__name__ == "_SessionSkip":
                outcome = "skipped"
            raise
        finally:
            tests, skipped = read_tests(session.name)
            result = SessionResult(
                session.name,
                outcome,
                (time.monotonic() - start) / 60,
                (processor_seconds() - before) / 60,
                tests,
                skipped,
            )
            path = RESULTS / f"{file_stem(session.name)}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(result)))

    return session_of


@contextlib.contextmanager
def logged(session: nox.Session) -> Iterator[None]:
    """Write the output of the block to a log, which is printed if the block raises.

    If the session is the only one, its output goes to the terminal, for progress and a debugger.
    """
    if not session.parallel:
        yield
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = log_path(session.name)
    saved = [os.dup(1), os.dup(2)]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        yield
    except BaseException:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.write(1, path.read_bytes())
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in zip((1, 2), saved, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
        os.close(log)


def results_option(session: nox.Session) -> str:
    """Return the option that makes pytest write what `read_tests` reads.

    A session may run pytest several times.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    stem = file_stem(session.name)
    number = len(list(RESULTS.glob(f"{stem}.*.xml")))
    path = RESULTS / f"{stem}.{number}.xml"
    path.touch()
    return f"--junitxml={path}"


def read_tests(session: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers of a session's tests by outcome, and of those skipped by reason."""
    outcomes: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for path in sorted(RESULTS.glob(f"{file_stem(session)}.*.xml")):
        if not path.stat().st_size:  # pytest did not reach its end
            continue
        for case in ElementTree.parse(path).iter("testcase"):
            tags = {element.tag: element for element in case}
            if "failure" in tags or "error" in tags:
                outcomes["failed"] += 1
            elif "skipped" in tags:
                outcomes["skipped"] += 1
                skipped[tags["skipped"].get("message", "no reason given")] += 1
            else:
                outcomes["passed"] += 1
    return dict(outcomes), dict(skipped)


def print_results(since: float) -> None:
    """Print the table of the sessions that have ended since a time, in seconds of the epoch."""
    paths = [path for path in RESULTS.glob("*.json") if path.stat().st_mtime >= since]
    paths.sort(key=lambda path: path.stat().st_mtime)
    results = [SessionResult(**json.loads(path.read_text())) for path in paths]
    if len(results) > 1:
        print(format_results(results, (time.time() - since) / 60), flush=True)


def format_results(results: list[SessionResult], minutes: float) -> str:
    """Return the table, the reasons of skipped tests, and where the logs are."""
    columns = ("passed", "failed", "skipped")
    head = ["session", "", *columns, "minutes", "processor minutes"]
    rows = [
        [
            result.name,
            "" if result.outcome == "passed" else result.outcome.upper(),
            *(str(result.tests.get(name, "")) for name in columns),
            f"{result.minutes:.1f}",
            f"{result.processor_minutes:.1f}",
        ]
        for result in results
    ]
    total = [sum(result.tests.get(name, 0) for result in results) for name in columns]
    processor = sum(result.processor_minutes for result in results)
    rows.append(["all", "", *map(str, total), f"{minutes:.1f}", f"{processor:.1f}"])
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]
    reasons: Counter[str] = Counter()
    for result in results:
        reasons.update(result.skipped)
    if reasons:
        lines += ["", "Skipped tests:"]
        lines += [f"{count:6}  {reason}" for reason, count in reasons.most_common()]
    failed = [result.name for result in results if result.outcome == "failed"]
    if failed:
        lines += ["", f"Failed: {', '.join(failed)}"]
    lines += ["", f"Logs: {RESULTS.relative_to(ROOT)}/<session>.log"]
    return "\n" + "\n".join(lines)


def processor_seconds() -> float:
    """Return the processor time of this process and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def log_path(session: str) -> Path:
    """Return the path of a session's log."""
    return RESULTS / f"{file_stem(session)}.log"


def file_stem(session: str) -> str:
    """Return the name of a session's files: `tests-rl-policy` for `tests(rl-policy)`."""
    return session.replace("(", "-").replace(")", "").replace("=", "-").replace("'", "")
