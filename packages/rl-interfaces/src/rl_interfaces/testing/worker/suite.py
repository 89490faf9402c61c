"""The rules about a worker as tests of pytest, for a backend's author to inherit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rl_interfaces.testing.report import Report, Status, require_conformance
from rl_interfaces.testing.worker.kit import WORKER_RULES

if TYPE_CHECKING:
    from collections.abc import Callable


class WorkerConformance:
    """One test a rule, of the worker that a fixture `worker_case` gives.

    The rules run once for each case, in an order that shares workers, and each test tells what
    became of its rule. A capability that the worker lacks is skipped with its name.

    With a fixture `run_ranks`, a function that takes a function and its keyword arguments, calls it
    on every rank of a job and returns the ranks' results, the worker runs on several ranks.

    Example:
        @pytest.fixture(scope="module")
        def worker_case():
            return WorkerCase(worker_class=MyWorker, ...)

        class TestMine(WorkerConformance):
            pass
    """

    @pytest.mark.parametrize("rule", [rule.name for rule in WORKER_RULES])
    def test_conformance(
        self,
        rule: str,
        worker_reports: list[Report],
        record_property: Callable[[str, object], None],
    ) -> None:
        """Fail where the rule is broken on a rank; skip where it says nothing on any."""
        record_property("conformance", rule)
        outcomes = [report.of(rule) for report in worker_reports]
        require_conformance(
            [Report(rank=report.rank, outcomes=(report.of(rule),)) for report in worker_reports]
        )
        if all(each.status is Status.NOT_APPLICABLE for each in outcomes):
            pytest.skip(outcomes[0].text)
