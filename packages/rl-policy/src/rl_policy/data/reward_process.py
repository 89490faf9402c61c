"""The process of a reward function: `python -m rl_policy.data.reward_process NAME LIMIT_S`.

It reads requests from its standard input and writes replies to its standard output, each a line of
JSON, and ends when the first is closed. What the function prints goes to the standard error.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_policy.data.datasets import Problem

Function = Callable[[list[str], list[Problem]], Any]

_PR_SET_PDEATHSIG = 1


class _UnusableError(Exception):
    """What is said of a function that cannot be loaded, or that returned no rewards."""


def main() -> None:
    """Load the function, say so, and answer until the requests end."""
    name, limit_s = sys.argv[1], float(sys.argv[2])
    # A function that hangs does not see its pipe closed.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(os.dup(0)) as reading, os.fdopen(os.dup(1), "w") as writing:
        # The function has neither of the two.
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        try:
            function = load_function(name)
        except Exception as error:  # the module is the user's: anything may be raised
            _reply(writing, {"error": _described(error)})
            return
        _reply(writing, {"rewards": []})
        for line in reading:
            request = json.loads(line)
            problems = [Problem(**each) for each in request["problems"]]
            reply = answer(function, request["completions"], problems, limit_s=limit_s)
            _reply(writing, reply)


def load_function(name: str) -> Function:
    """Return the function that `FILE.py:NAME` or `PACKAGE.MODULE:NAME` names.

    Raises:
        Exception: There is no such file or function, or whatever its module raises.
    """
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise _UnusableError(f"{path} is no file")
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        module = importlib.import_module(place)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise _UnusableError(f"{place} has no function {attribute}")
    try:
        return require_signature(function, name=attribute)
    except TypeError as error:
        raise _UnusableError(str(error)) from None


def require_signature(function: Any, *, name: str) -> Function:
    """Return a function that takes completions and problems.

    Raises:
        TypeError: It does not; names it.
    """
    if not callable(function):
        raise TypeError(f"a reward must be a function, got {function!r}")
    try:
        inspect.signature(function).bind([], [])
    except TypeError as error:
        raise TypeError(f"{name} must take completions and problems: {error}") from None
    return function


def answer(
    function: Function,
    completions: Sequence[str],
    problems: Sequence[Problem],
    *,
    limit_s: float,
) -> dict[str, Any]:
    """Return `rewards`, or the `error` of a function and the index of its `sample` where it shows.

    Args:
        function: Of the user's.
        completions: One for each of the problems.
        problems: As the function takes them.
        limit_s: Seconds of the call that the caller waits for.
    """
    started = time.monotonic()
    try:
        return {"rewards": _rewards(function, completions, problems)}
    except Exception as error:  # as above
        described = _described(error)
    # Which sample it was shows when each is alone, as far as there is time: what the function did
    # wrong must not become that it took too long.
    for index, pair in enumerate(zip(completions, problems, strict=True)):
        if time.monotonic() - started > limit_s / 2:
            break
        try:
            _rewards(function, [pair[0]], [pair[1]])
        except Exception as error:  # as above
            return {"error": _described(error), "sample": index}
    return {"error": described}


def _rewards(
    function: Function, completions: Sequence[str], problems: Sequence[Problem]
) -> list[float]:
    returned = function(list(completions), list(problems))
    if inspect.isawaitable(returned):
        returned = asyncio.run(_awaited(returned))
    try:
        values = list(returned)
    except TypeError:
        raise _UnusableError(
            f"it returned a {type(returned).__name__}, expected a number for each completion"
        ) from None
    if len(values) != len(completions):
        raise _UnusableError(
            f"it returned {len(values)} rewards for {len(completions)} completions"
        )
    return [_number(value) for value in values]


async def _awaited(returned: Any) -> Any:
    return await returned


def _number(value: Any) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise _UnusableError(f"it returned {value!r:.60}, a {type(value).__name__}")
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise _UnusableError(f"it returned {number}")
    return number


def _described(error: Exception) -> str:
    """Return the error and the line of the user's that raised it."""
    if isinstance(error, _UnusableError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    last = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"it raised {type(error).__name__}: {error}{last}"


def _reply(writing: Any, reply: dict[str, object]) -> None:
    writing.write(json.dumps(reply) + "\n")
    writing.flush()


if __name__ == "__main__":
    main()
