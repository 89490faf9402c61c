"""Rules, what became of each, and how that is told."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType


class NotApplicable(Exception):
    """A rule says nothing about this backend; the text says what it lacks."""


class ConformanceError(AssertionError):
    """A backend breaks rules; the text names each, with what was seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One thing that a backend is held to."""

    check: Callable[[Any], None]
    """Raises where the rule is broken, or `NotApplicable` where it says nothing."""
    needs: type | None = None
    """The optional capability that it is about, a protocol of `rl_interfaces`."""

    @property
    def name(self) -> str:
        """The rule in words with underscores between them."""
        return self.check.__name__

    @property
    def summary(self) -> str:
        """The rule in a sentence."""
        return (self.check.__doc__ or "").partition("\n")[0]


def rule(*, needs: type | None = None) -> Callable[[Callable[[Any], None]], Rule]:
    """Return a decorator that makes a `Rule` of a function."""
    return lambda check: Rule(check=check, needs=needs)


def rules_of(*modules: ModuleType) -> tuple[Rule, ...]:
    """Return the rules that modules define, in their order."""
    return tuple(
        value for module in modules for value in vars(module).values() if isinstance(value, Rule)
    )


class Status(Enum):
    """What became of a rule."""

    HOLDS = "holds"
    """It was checked."""
    BROKEN = "broken"
    """It was checked, and the backend breaks it."""
    NOT_APPLICABLE = "not applicable"
    """The backend has nothing to check; the text names what it lacks."""
    NOT_RUN = "not run"
    """The ranks were at odds over a rule before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one rule on one rank."""

    rule: str
    status: Status
    text: str = ""
    """What was seen, or what is lacking."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of every rule on one rank."""

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


def run_rule(rule: Rule, subject: Any) -> Outcome:
    """Return what becomes of `rule` where its subject is what it is called with.

    Args:
        rule: One with `needs` is about an optional capability.
        subject: Has a `require`, which raises `NotApplicable`, where a rule has `needs`.
    """
    try:
        if rule.needs is not None:
            subject.require(rule.needs)
        rule.check(subject)
    except NotApplicable as lack:
        return Outcome(rule=rule.name, status=Status.NOT_APPLICABLE, text=str(lack))
    except Exception as error:
        seen = f"{rule.summary}\n{''.join(traceback.format_exception(error))}"
        return Outcome(rule=rule.name, status=Status.BROKEN, text=seen)
    return Outcome(rule=rule.name, status=Status.HOLDS)


def require_conformance(reports: Sequence[Report]) -> None:
    """Raise unless every rule that was checked holds on every rank.

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
    """Raise a RuntimeError where rules that are written as `assert` would be left out."""
    if not __debug__:
        raise RuntimeError("python -O leaves out the assertions that the rules are made of")


def check_each(names: Iterable[str], check: Callable[[str], None], *, subject: str) -> list[str]:
    """Call `check` with each name of a rule; return what was skipped, a line each.

    Args:
        names: The rules.
        check: Raises where a rule is broken, and `SkipTest` where it says nothing.
        subject: What is checked, for the message.

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
