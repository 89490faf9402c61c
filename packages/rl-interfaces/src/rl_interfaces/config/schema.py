"""Validation of a user's value against the types of a TypedDict."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from typing_extensions import is_typeddict


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The range of a number: metadata of an `Annotated` type. A float has to be finite besides.

    Example:
        Annotated[float, Bounds(gt=0, le=1)]
    """

    ge: float | None = None
    """Least."""
    gt: float | None = None
    """What the number is above."""
    le: float | None = None
    """Most."""
    lt: float | None = None
    """What the number is below."""
    besides: float | None = None
    """A single number out of the range that is valid, too."""

    def __str__(self) -> str:
        """Return the range as a reference shows it, without the limits that no value comes near."""
        signs = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        texts = [f"{sign} {limit}" for sign, limit in signs if limit is not None and limit < MOST]
        return " ".join(texts) + ("" if self.besides is None else f" or {self.besides}")

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a number, None if nothing is."""
        assert isinstance(value, (int, float))
        if isinstance(value, float) and not math.isfinite(value):
            return "must be finite"
        other = "" if self.besides is None else f", or {self.besides}"
        if value == self.besides:
            return None
        if self.ge is not None and value < self.ge:
            return f"must be at least {self.ge}{other}"
        if self.gt is not None and value <= self.gt:
            return f"must be above {self.gt}{other}"
        if self.le is not None and value > self.le:
            return f"must be at most {self.le}{other}"
        if self.lt is not None and value >= self.lt:
            return f"must be below {self.lt}{other}"
        return None


@dataclass(frozen=True, slots=True)
class NotEmpty:
    """A text or a list with something in it: metadata of an `Annotated` type."""

    def __str__(self) -> str:
        """Return nothing, as a reference need not say it."""
        return ""

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a value, None if nothing is."""
        return None if value else "must not be empty"


# Far above any count of rows, tokens, ranks or steps, and within what 32 bits hold.
MOST = 2**31 - 1
Count = Annotated[int, Bounds(ge=1, le=MOST)]
"""A number of things, at least one."""
Index = Annotated[int, Bounds(ge=0, le=MOST)]
"""A number of things that may be none, or the place of one."""
# numpy's generator, which vLLM seeds, takes no more.
Seed = Annotated[int, Bounds(ge=0, lt=2**32)]
"""A seed of random numbers."""
NotNegative = Annotated[float, Bounds(ge=0)]
"""A number that is finite and not negative."""
Positive = Annotated[float, Bounds(gt=0)]
"""A number that is finite and above zero."""
Fraction = Annotated[float, Bounds(ge=0, lt=1)]
"""A number in [0, 1)."""
# Two ranks take up to a second to answer each other; more than a year is no limit.
Seconds = Annotated[float, Bounds(ge=1, le=366 * 24 * 3600)]
"""A limit of time."""
# Below 0.01, vLLM raises the temperature by itself, and quotients of logits overflow.
Temperature = Annotated[float, Bounds(ge=0.01, le=10_000, besides=0)]
"""What divides logits; 0 for the most likely token."""
Probability = Annotated[float, Bounds(gt=0, le=1)]
"""A number in (0, 1]."""
Text = Annotated[str, NotEmpty()]
"""A text that is not empty."""


@dataclass(frozen=True, slots=True)
class _Problem:
    path: str
    text: str


def check_typed_dict(value: object, typed_dict: type, *, path: str) -> None:
    """Raise `ValueError` unless `value` has only keys of `typed_dict`, with values of its types.

    Keys may be missing or None, which both mean "not set". An int stands for a float; nothing else
    is converted.

    Args:
        value: The user's value.
        typed_dict: The TypedDict class that declares keys and types.
        path: Prefix of the keys in error messages.
    """
    problem = _typed_dict_problem(value, typed_dict, path=path)
    if problem is not None:
        raise ValueError(f"{problem.path} {problem.text}")


def check_type(value: object, expected: object, *, path: str) -> None:
    """Raise `ValueError` unless `value` is of a type; as strict as `check_typed_dict`.

    Args:
        value: The user's value.
        expected: A type, which may be composed: `list[int] | None`.
        path: Its key, for the error message.
    """
    problem = _type_problem(value, expected, path=path)
    if problem is not None:
        raise ValueError(f"{problem.path} {problem.text}")


def check_ranges(value: Mapping[str, object], typed_dict: type, *, path: str) -> None:
    """Raise `ValueError` if a value is out of the range that its type declares.

    Sections whose key `enabled` is false are skipped.

    Args:
        value: A mapping that has passed `check_typed_dict`.
        typed_dict: The TypedDict class, with `Bounds` or `NotEmpty` in the types of its keys.
        path: Prefix of the keys in error messages.
    """
    problem = _range_problem(value, typed_dict, path=path)
    if problem is not None:
        raise ValueError(f"{problem.path}{problem.text}")


def as_mapping(value: object, *, path: str) -> Mapping[str, object]:
    """Return `value`.

    Raises:
        ValueError: It is no mapping.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} must be a mapping, got {_describe(value)}")
    return cast("Mapping[str, object]", value)


@cache
def _hints_of(typed_dict: type) -> Mapping[str, object]:
    """Return the types of the keys, which Python compiles from text at each call."""
    return get_type_hints(typed_dict, include_extras=True)


def _typed_dict_problem(value: object, typed_dict: type, *, path: str) -> _Problem | None:
    if not isinstance(value, Mapping):
        return _wrong_type(value, "a mapping", path=path)
    hints = _hints_of(typed_dict)
    for key, entry in cast("Mapping[str, object]", value).items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys are {sorted(hints)}"
            return _Problem(f"{path}.{key}", f"is not a known key, {hint}")
        if entry is None:
            continue
        problem = _type_problem(entry, hints[key], path=f"{path}.{key}")
        if problem is not None:
            return problem
    return None


def _type_problem(value: object, expected: object, *, path: str) -> _Problem | None:
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (NotRequired, Required, Annotated):
        return _type_problem(value, arguments[0], path=path)
    if origin in (Union, types.UnionType):
        return _union_problem(value, arguments, path=path)
    if isinstance(expected, type) and is_typeddict(expected):
        return _typed_dict_problem(value, expected, path=path)
    if origin is list:
        return _list_problem(value, arguments[0], path=path)
    if origin is dict:
        return _dict_problem(value, arguments[1], path=path)
    if not _is_scalar(value, expected):
        return _wrong_type(value, _type_name(expected), path=path)
    return None


def _range_problem(value: object, expected: object, *, path: str) -> _Problem | None:
    origin, arguments = get_origin(expected), get_args(expected)
    if value is None:
        return None
    if origin in (NotRequired, Required):
        return _range_problem(value, arguments[0], path=path)
    if origin is Annotated:
        rules = (rule for rule in arguments[1:] if isinstance(rule, (Bounds, NotEmpty)))
        texts = (rule.problem(value) for rule in rules)
        text = next((text for text in texts if text is not None), None)
        if text is not None:
            return _Problem(path, f"={value!r} {text}")
        return _range_problem(value, arguments[0], path=path)
    if origin in (Union, types.UnionType):
        member = next(m for m in arguments if _type_problem(value, m, path=path) is None)
        return _range_problem(value, member, path=path)
    problems = (
        _range_problem(entry, kind, path=inner)
        for entry, kind, inner in _entries(value, expected, path=path)
    )
    return next((problem for problem in problems if problem is not None), None)


def _entries(value: object, expected: object, *, path: str) -> Iterator[tuple[object, object, str]]:
    """Yield what a list or mapping holds, with its type and path; nothing if it is not enabled."""
    origin, arguments = get_origin(expected), get_args(expected)
    if isinstance(value, list) and origin is list:
        for index, entry in enumerate(cast("list[object]", value)):
            yield entry, arguments[0], f"{path}[{index}]"
    elif isinstance(value, Mapping):
        section = cast("Mapping[str, object]", value)
        is_section = isinstance(expected, type) and is_typeddict(expected)
        is_off = is_section and section.get("enabled", True) is False
        if is_off or not (is_section or origin is dict):
            return
        hints: Mapping[str, object] = _hints_of(cast("type", expected)) if is_section else {}
        for key, entry in section.items():
            yield entry, hints[key] if is_section else arguments[1], f"{path}.{key}"


def _list_problem(value: object, expected: object, *, path: str) -> _Problem | None:
    if not isinstance(value, list):
        return _wrong_type(value, "a list", path=path)
    entries = enumerate(cast("list[object]", value))
    problems = (_type_problem(entry, expected, path=f"{path}[{i}]") for i, entry in entries)
    return next((problem for problem in problems if problem is not None), None)


def _dict_problem(value: object, expected: object, *, path: str) -> _Problem | None:
    if not isinstance(value, Mapping):
        return _wrong_type(value, "a mapping", path=path)
    entries = cast("Mapping[str, object]", value).items()
    problems = (_type_problem(entry, expected, path=f"{path}.{key}") for key, entry in entries)
    return next((problem for problem in problems if problem is not None), None)


def _union_problem(value: object, members: tuple[object, ...], *, path: str) -> _Problem | None:
    problems = [_type_problem(value, member, path=path) for member in members]
    if None in problems:
        return None
    # The member that matches deepest is the one the user meant: report its problem.
    deepest = max((p for p in problems if p is not None), key=lambda problem: len(problem.path))
    if deepest.path != path:
        return deepest
    names = " or ".join(_type_name(member) for member in members)
    return _wrong_type(value, names, path=path)


def _is_scalar(value: object, expected: object) -> bool:
    if expected is Any:
        return True
    if get_origin(expected) is Literal:
        return isinstance(value, str) and value in get_args(expected)
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(expected, type) and isinstance(value, expected)


def _type_name(expected: object) -> str:
    if get_origin(expected) is Literal:
        return " or ".join(map(repr, get_args(expected)))
    if get_origin(expected) is Annotated:
        return _type_name(get_args(expected)[0])
    return "None" if expected is type(None) else str(getattr(expected, "__name__", expected))


def _wrong_type(value: object, expected: str, *, path: str) -> _Problem:
    return _Problem(path, f"must be {expected}, got {_describe(value)}")


def _describe(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r}"
