"""What processes that run a user's code share: its load by name, and words for its errors."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import math
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

ValueT = TypeVar("ValueT")

_PR_SET_PDEATHSIG = 1


class UnusableError(Exception):
    """What is said of a user's code that cannot be loaded, or that returned something else."""


def require_name(name: str, *, key: str) -> None:
    """Raise `ValueError`, which names the key, unless a name is one that `load_attribute` takes."""
    if not all(name.rpartition(":")[::2]):
        raise ValueError(f"{key}={name!r} must be FILE.py:NAME or PACKAGE.MODULE:NAME")


def load_attribute(name: str) -> Any:
    """Return what `FILE.py:NAME` or `PACKAGE.MODULE:NAME` names, from a fresh import.

    The directory of the file, or the working directory, is put on the path.

    Raises:
        Exception: There is no such file or callable, or whatever its module raises.
    """
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise UnusableError(f"{path} is no file")
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
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UnusableError(f"{place} has no function {attribute}")
    return found


def require_signature(function: Any, *arguments: object, name: str, takes: str) -> Any:
    """Return a function that can be called with the arguments, as far as its signature shows.

    Args:
        function: Of the user's.
        arguments: Examples of what it is called with.
        name: Of the function, for the error.
        takes: What these are, for the error.

    Raises:
        TypeError: It cannot; names it.
    """
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name} must take {takes}: {error}") from None
    except ValueError:
        pass  # some that are built in have no signature: the first call shows it
    return function


def finite_number(value: Any) -> float:
    """Return a number that a user's code returned.

    Raises:
        UnusableError: It is none, or not finite.
    """
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise UnusableError(f"it returned {value!r:.60}, a {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise UnusableError(f"it returned {number}")
    return number


def described(error: BaseException) -> str:
    """Return the error and the line of the user's that raised it."""
    if isinstance(error, UnusableError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    last = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"it raised {type(error).__name__}: {error}{last}"


async def awaited(returned: Awaitable[ValueT]) -> ValueT:
    """Return what an awaitable gives, as a coroutine, which `asyncio.run` asks for."""
    return await returned


def end_with_parent(*, is_on: bool = True) -> None:
    """Let the kernel kill this process when the thread that started it ends, or no longer."""
    # Code that hangs does not see its pipe closed.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if is_on else 0)


def end_process(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """Wait for a process that ends by itself, as its input has ended; kill it if it hangs.

    Args:
        process: Whose input is closed.
        grace_s: Seconds until it is killed.
    """
    try:
        process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def detach_standard_streams() -> None:
    """Give the user's code an empty input, and the standard error for what it prints."""
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
