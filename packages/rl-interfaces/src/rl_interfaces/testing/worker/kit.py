"""Every rule about a worker, and the function that checks one rank of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rl_interfaces.testing.ranks import Ranks, joined_ranks
from rl_interfaces.testing.report import Outcome, Report, Rule, Status, rules_of, run_rule
from rl_interfaces.testing.worker.bench import WorkerBench
from rl_interfaces.testing.worker.rules import (
    checkpoints,
    errors,
    information,
    residency,
    sampling,
    scoring,
    traces,
    training,
    weights,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from rl_interfaces.testing.worker.case import WorkerCase

# Those that leave one worker as it is come first, so that they share it.
WORKER_RULES: tuple[Rule, ...] = rules_of(
    information, errors, sampling, weights, scoring, training, traces, residency, checkpoints
)


def check_worker(
    case: WorkerCase, *, directory: str | Path, only: Collection[str] | None = None
) -> Report:
    """Return what becomes of each rule on this rank; every rank calls it at the same time.

    Without torchrun's environment variables it runs as the only rank. Where the ranks are at odds
    over a rule, which some of them may have left half-way, the rules after it are not run.

    Args:
        case: The worker, and what it is held against.
        directory: An empty directory that every rank sees.
        only: The names of the rules to check. None: all.

    Raises:
        ValueError: `only` names a rule that there is not, or the case cannot be used at all.
    """
    names = [rule.name for rule in WORKER_RULES]
    unknown = sorted(set(only or ()) - set(names))
    if unknown:
        raise ValueError(f"there are no rules {unknown}: there are {names}")
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
            bench.close()
        try:
            if ranks.any(is_broken) and not ranks.all(is_broken):
                obstacle = "the ranks were at odds over a rule before it"
        except Exception as error:
            obstacle = f"the ranks lost one another in {rule.name}: {error}"
            if not is_broken:
                outcome = Outcome(rule=rule.name, status=Status.BROKEN, text=obstacle)
        outcomes.append(outcome)
    return outcomes
