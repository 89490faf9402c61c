"""The worker kit: `check_worker` runs the rules on one rank, `WorkerConformance` as pytest tests.

Ranks agree on each verdict over a gloo group of their own: a worker under test may leave its
collectives half-way, and a message on its own groups could then be matched with the wrong call.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast
from unittest import SkipTest

import torch.distributed as dist

from rl_interfaces.backend.runtime import (
    RankEnvironment,
    ReservedPort,
    init_process_group,
    leave_process_group,
    variables_set,
)
from rl_interfaces.testing.report import (
    Outcome,
    Report,
    Rule,
    Status,
    require_conformance,
    rules_of,
    run_rule,
)
from rl_interfaces.testing.worker import information, scoring, split, state, training, weights
from rl_interfaces.testing.worker.bench import WorkerBench

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import pytest

    from rl_interfaces.testing.worker.case import WorkerCase


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This rank, and a process group that carries verdicts only."""

    rank: int
    world_size: int
    verdicts: dist.ProcessGroup

    def any(self, condition: bool) -> bool:
        """Return whether `condition` is true on any rank. Collective."""
        return any(self._gather(condition))

    def all(self, condition: bool) -> bool:
        """Return whether `condition` is true on every rank. Collective."""
        return all(self._gather(condition))

    def _gather(self, condition: bool) -> list[bool]:
        # After destroy_process_group the gather would return without communicating.
        if not dist.is_initialized():
            raise RuntimeError("the process group is gone: a worker has destroyed it")
        gathered = [condition] * self.world_size
        dist.all_gather_object(gathered, condition, group=self.verdicts)
        return gathered


@contextmanager
def joined_ranks(*, timeout_s: float) -> Iterator[Ranks]:
    """Join the default process group, unless the process is already in one.

    Without torchrun's variables the job has a single rank. The group outlives each worker, so that
    rules can build several in a row.
    """
    with ExitStack() as leaving:
        leaving.enter_context(_one_rank_unless_launched())
        environment = RankEnvironment.from_environment()
        if init_process_group(environment, timeout_s=timeout_s):
            leaving.callback(leave_process_group)
        verdicts = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        yield Ranks(
            rank=environment.rank,
            world_size=environment.world_size,
            verdicts=cast("dist.ProcessGroup", verdicts),
        )


@contextmanager
def _one_rank_unless_launched() -> Iterator[None]:
    if "RANK" in os.environ:
        yield
        return
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with ReservedPort() as port, variables_set({**alone, "MASTER_PORT": str(port.number)}):
        yield


# Rules that leave the worker unchanged come first, so that they share one.
WORKER_RULES: tuple[Rule, ...] = rules_of(information, scoring, weights, training, split, state)


def check_worker(
    case: WorkerCase, *, directory: str | Path, only: Collection[str] | None = None
) -> Report:
    """Return the outcome of each rule on this rank. Collective.

    Without torchrun's environment variables it runs as a single rank. If a rule fails on some ranks
    only, the later rules are not run: the failed ranks may have left a collective half-way.

    Args:
        case: The worker and its reference model.
        directory: An empty directory shared by all ranks.
        only: The names of the rules to check. None: all.

    Raises:
        ValueError: `only` names an unknown rule, or the case is unusable.
    """
    names = [rule.name for rule in WORKER_RULES]
    unknown = sorted(set(only or ()) - set(names))
    if unknown:
        raise ValueError(f"unknown rules {unknown}; known are {names}")
    wanted = [rule for rule in WORKER_RULES if only is None or rule.name in only]
    with joined_ranks(timeout_s=case.timeout_s) as ranks:
        bench = WorkerBench(case, ranks=ranks, directory=Path(directory))
        try:
            outcomes = _run(wanted, bench, ranks)
        finally:
            bench.close()
    return Report(rank=ranks.rank, outcomes=tuple(outcomes))


def _run(rules: list[Rule], bench: WorkerBench, ranks: Ranks) -> list[Outcome]:
    outcomes: list[Outcome] = []
    obstacle = ""
    for rule in rules:
        if obstacle:
            outcomes.append(Outcome(rule=rule.name, status=Status.NOT_RUN, text=obstacle))
            continue
        outcome = run_rule(rule, bench)
        is_broken = outcome.status is Status.BROKEN
        if is_broken:
            # The worker's state is unknown after a failure: the next rule builds a new one.
            bench.close()
        # Every rank takes part in the verdict, also after a failure: a rank that moved on to the
        # next rule alone would wait in the worker's collectives for ranks that never come.
        try:
            if ranks.any(is_broken) and not ranks.all(is_broken):
                obstacle = "an earlier rule failed on some ranks only"
        except Exception as error:
            obstacle = f"communication between ranks failed after {rule.name}: {error}"
            if not is_broken:
                outcome = Outcome(rule=rule.name, status=Status.BROKEN, text=obstacle)
        outcomes.append(outcome)
    return outcomes


class WorkerConformance:
    """One pytest test per rule, for the worker of the fixture `worker_case`.

    All rules run once per case, in an order that reuses workers, and each test reports the outcome
    of its rule. Rules on a capability that the worker lacks are skipped and name it.

    To run on several ranks, define a fixture `run_ranks`: a function that takes a function and its
    keyword arguments, calls it on every rank of a job and returns the results of all ranks.

    Example:
        @pytest.fixture(scope="module")
        def worker_case():
            return WorkerCase(worker_class=MyWorker, ...)

        class TestMine(WorkerConformance):
            pass
    """

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of every rule; called by pytest."""
        # A suite may have further tests in addition to those of the rules.
        if "rule" in metafunc.fixturenames:
            metafunc.parametrize("rule", [rule.name for rule in WORKER_RULES])

    def test_conformance(
        self,
        rule: str,
        worker_reports: list[Report],
        record_property: Callable[[str, object], None],
    ) -> None:
        """Fail if a rank breaks the rule; skip if it applies to no rank."""
        record_property("conformance", rule)
        outcomes = [report.of(rule) for report in worker_reports]
        require_conformance(
            [Report(rank=report.rank, outcomes=(report.of(rule),)) for report in worker_reports]
        )
        if all(each.status is Status.NOT_APPLICABLE for each in outcomes):
            raise SkipTest(outcomes[0].text)
