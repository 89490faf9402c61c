"""The process of a reward function: `python -m rl_policy.data.reward_process NAME LIMIT_S`.

It reads requests from its standard input and writes replies to its standard output, each a line of
JSON, and ends when the first is closed. What the function prints goes to the standard error.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rl_policy.data.datasets import Problem
from rl_policy.data.user_code import (
    UnusableError,
    awaited,
    described,
    detach_standard_streams,
    end_with_parent,
    finite_number,
    load_attribute,
    require_signature,
)

Function = Callable[[list[str], list[Problem]], Any]


def main() -> None:
    """Load the function, say so, and answer until the requests end."""
    name, limit_s = sys.argv[1], float(sys.argv[2])
    end_with_parent()
    with os.fdopen(os.dup(0)) as reading, os.fdopen(os.dup(1), "w") as writing:
        # The function has neither of the two.
        detach_standard_streams()
        try:
            function = load_function(name)
        except Exception as error:  # the module is the user's: anything may be raised
            _reply(writing, {"error": described(error)})
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
    function = load_attribute(name)
    try:
        return require_reward(function, name=name.rpartition(":")[2])
    except TypeError as error:
        raise UnusableError(str(error)) from None


def require_reward(function: Any, *, name: str) -> Function:
    """Return a function that takes completions and problems.

    Raises:
        TypeError: It does not; names it.
    """
    if not callable(function):
        raise TypeError(f"a reward must be a function, got {function!r}")
    return require_signature(function, [], [], name=name, takes="completions and problems")


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
        description = described(error)
    # Which sample it was shows when each is alone, as far as there is time: what the function did
    # wrong must not become that it took too long.
    for index, pair in enumerate(zip(completions, problems, strict=True)):
        if time.monotonic() - started > limit_s / 2:
            break
        try:
            _rewards(function, [pair[0]], [pair[1]])
        except Exception as error:  # as above
            return {"error": described(error), "sample": index}
    return {"error": description}


def _rewards(
    function: Function, completions: Sequence[str], problems: Sequence[Problem]
) -> list[float]:
    returned = function(list(completions), list(problems))
    if inspect.isawaitable(returned):
        returned = asyncio.run(awaited(returned))
    try:
        values = list(returned)
    except TypeError:
        raise UnusableError(
            f"it returned a {type(returned).__name__}, expected a number for each completion"
        ) from None
    if len(values) != len(completions):
        raise UnusableError(f"it returned {len(values)} rewards for {len(completions)} completions")
    return [finite_number(value) for value in values]


def _reply(writing: Any, reply: dict[str, object]) -> None:
    writing.write(json.dumps(reply) + "\n")
    writing.flush()


if __name__ == "__main__":
    main()
