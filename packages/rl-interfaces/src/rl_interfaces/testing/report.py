"""Rules, their outcomes, and the report of a run."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING
from unittest import SkipTest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType

    from rl_interfaces.testing.worker.bench import WorkerBench


class NotApplicable(Exception):
    """A rule does not apply to this backend; the text names what it lacks."""


class ConformanceError(AssertionError):
    """A backend breaks rules; the text names each, with the traceback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One requirement on a backend."""

    check: Callable[[WorkerBench], None]
    """Raises if the rule is broken, or `NotApplicable`."""
    needs: type | None = None
    """The optional capability it applies to, a protocol of `rl_interfaces`."""

    @property
    def name(self) -> str:
        """The rule in words with underscores between them."""
        return self.check.__name__

    @property
    def summary(self) -> str:
        """The rule in a sentence."""
        return (self.check.__doc__ or "").partition("\n")[0]


def rule(*, needs: type | None = None) -> Callable[[Callable[[WorkerBench], None]], Rule]:
    """Return a decorator that makes a `Rule` of a function."""
    return lambda check: Rule(check=check, needs=needs)


def rules_of(*modules: ModuleType) -> tuple[Rule, ...]:
    """Return the rules that modules define, in their order."""
    return tuple(
        value for module in modules for value in vars(module).values() if isinstance(value, Rule)
    )


class Status(Enum):
    """The outcome of a rule."""

    HOLDS = "holds"
    """The backend follows it."""
    BROKEN = "broken"
    """The backend breaks it."""
    NOT_APPLICABLE = "not applicable"
    """The backend lacks the capability that the text names."""
    NOT_RUN = "not run"
    """An earlier rule failed on some ranks only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one rule on one rank."""

    rule: str
    status: Status
    text: str = ""
    """The traceback, or the capability that is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The outcomes of all rules on one rank."""

    rank: int
    outcomes: tuple[Outcome, ...]

    def of(self, rule: str) -> Outcome:
        """Return the outcome of one rule."""
        (outcome,) = [each for each in self.outcomes if each.rule == rule]
        return outcome

    @property
    def broken(self) -> list[str]:
        """The names of the rules that are broken."""
        return [each.rule for each in self.outcomes if each.status is Status.BROKEN]


def run_rule(rule: Rule, bench: WorkerBench) -> Outcome:
    """Call `rule` and return its outcome."""
    try:
        if rule.needs is not None:
            bench.require(rule.needs)
        rule.check(bench)
    except NotApplicable as lack:
        return Outcome(rule=rule.name, status=Status.NOT_APPLICABLE, text=str(lack))
    except Exception as error:
        seen = f"{rule.summary}\n{''.join(traceback.format_exception(error))}"
        return Outcome(rule=rule.name, status=Status.BROKEN, text=seen)
    return Outcome(rule=rule.name, status=Status.HOLDS)


def require_conformance(reports: Sequence[Report]) -> None:
    """Raise if a rule is broken or was not run on any rank.

    Raises:
        ConformanceError: Names the rules and the ranks.
    """
    failures = [
        f"rank {report.rank}: {outcome.rule} is {outcome.status.value}: {outcome.text}"
        for report in reports
        for outcome in report.outcomes
        if outcome.status in (Status.BROKEN, Status.NOT_RUN)
    ]
    if failures:
        raise ConformanceError("\n\n".join(failures))


def require_assertions() -> None:
    """Raise a RuntimeError under `python -O`, which strips the assertions of the rules."""
    if not __debug__:
        raise RuntimeError(
            "python -O strips the assertions that the rules consist of: run without it"
        )


def check_each(names: Iterable[str], check: Callable[[str], None], *, subject: str) -> list[str]:
    """Call `check` with the name of each rule; return one line per skipped rule.

    Args:
        names: Names of the rules.
        check: Raises if a rule is broken, and `SkipTest` if it does not apply.
        subject: Names what is checked in the message.

    Raises:
        ConformanceError: Rules are broken; the message has a line for each.
    """
    broken: list[str] = []
    skipped: list[str] = []
    for name in names:
        try:
            check(name)
        except SkipTest as reason:
            skipped.append(f"{name}: {reason}")
        except Exception as error:
            text = str(error).partition("\n")[0]
            broken.append(f"{name}: {type(error).__name__}: {text}")
    if broken:
        raise ConformanceError("\n".join([f"{subject} does not conform:", *broken]))
    return skipped
