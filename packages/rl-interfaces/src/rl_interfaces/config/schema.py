"""Validation of a user's value against the types of a TypedDict."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import (
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


def as_mapping(value: object, *, path: str) -> Mapping[str, object]:
    """Return `value`.

    Raises:
        ValueError: It is no mapping.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} must be a mapping, got {_describe(value)}")
    return cast("Mapping[str, object]", value)


def _typed_dict_problem(value: object, typed_dict: type, *, path: str) -> _Problem | None:
    if not isinstance(value, Mapping):
        return _wrong_type(value, "a mapping", path=path)
    hints = get_type_hints(typed_dict, include_extras=True)
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
    if origin in (NotRequired, Required):
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
    return "None" if expected is type(None) else str(getattr(expected, "__name__", expected))


def _wrong_type(value: object, expected: str, *, path: str) -> _Problem:
    return _Problem(path, f"must be {expected}, got {_describe(value)}")


def _describe(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r}"
