"""pytest plugin: fixtures of the conformance tests, and a summary of their outcomes.

It does not import torch: pytest loads it in every session, the kit only when its tests run.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_interfaces.testing.report import Report
    from rl_interfaces.testing.worker.case import WorkerCase


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[object]]:
    """Call a function on every rank of a job; the default is one rank, in this process."""
    return lambda function, **arguments: [function(**arguments)]


@pytest.fixture(scope="class")
def worker_reports(
    request: pytest.FixtureRequest,
    worker_case: WorkerCase,
    run_ranks: Callable[..., list[Report]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Report]:
    """The report of each rank, on the rules whose tests are selected."""
    from rl_interfaces.testing.worker.kit import check_worker

    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    mine = [item for item in items if item.cls is request.cls]
    # A suite may have further tests in addition to those of the rules.
    parameters = (item.callspec.params for item in mine if hasattr(item, "callspec"))
    rules = {str(each["rule"]) for each in parameters if "rule" in each}
    directory = str(tmp_path_factory.mktemp("conformance"))
    return run_ranks(check_worker, case=worker_case, directory=directory, only=sorted(rules))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts of outcomes per suite, and each rule that failed or was skipped."""
    suites: defaultdict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            rule = dict(getattr(report, "user_properties", ())).get("conformance")
            if rule is not None:
                suite = report.nodeid.partition("[")[0].rpartition("::")[0]
                suites[suite][outcome].append(_line(str(rule), report.longrepr, outcome))
    if not suites:
        return
    terminalreporter.section("conformance")
    for suite, outcomes in suites.items():
        counts = ", ".join(f"{len(rules)} {outcome}" for outcome, rules in outcomes.items())
        terminalreporter.write_line(f"{suite}: {counts}")
        for outcome in ("failed", "skipped"):
            for line in outcomes.get(outcome, []):
                terminalreporter.write_line(f"  {outcome}: {line}")


def _line(rule: str, shown: object, outcome: str) -> str:
    """Return a rule's name, with the reason where it was skipped."""
    reason = shown[2] if outcome == "skipped" and isinstance(shown, tuple) else ""
    return f"{rule} ({reason.removeprefix('Skipped: ')})" if reason else rule
