"""Look at an installed package from inside its environment: `python -I probe.py REQUEST`.

REQUEST is a JSON object: `package`, the import name; `extra_modules`, the modules that an extra of
it brings, all of them; `wanted`, those that are installed here; `forbidden`, the modules that the
others must not load; `alone`, whether the package is there without an extra, where these must not
even be installed; `brings`, the only distributions that may be there, or null; `works`, a statement
that must run, or null; `refusals`, pairs of a statement and what the `ImportError` that it raises
must say. Prints a JSON object of what it measured. Only the standard library is imported, as
nothing else may be there.

An extra that brings nothing forbidden changes nothing of what modules load: these are imported
where the package is alone, which is also where the time of it is measured.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import pkgutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMED = """
import sys, time
start = time.process_time()
exec(f"from {sys.argv[1]} import *")
print(time.process_time() - start)
"""


def import_modules(request: dict[str, Any]) -> int:
    """Import every module, those of extras last; return how many.

    Raises:
        AssertionError: One of them is not the wheel's, or loads what it must not.
    """
    package = importlib.import_module(request["package"])
    if "site-packages" not in str(package.__file__):
        raise AssertionError(f"not the installed wheel: {package.__file__}")
    count = import_tree(package.__name__, leave_out=request["extra_modules"])
    loaded = [name for name in request["forbidden"] if name in sys.modules]
    if loaded:
        raise AssertionError(f"importing {request['package']} loads {', '.join(loaded)}")
    missing = [name for name in request["wanted"] if importlib.util.find_spec(name) is None]
    if missing:
        raise AssertionError(f"the wheel lacks {', '.join(missing)}")
    return count + sum(import_tree(name) for name in request["wanted"])


def import_tree(name: str, *, leave_out: Sequence[str] = ()) -> int:
    """Import a module and all inside it but `leave_out` and what is inside those; return how many.

    What is left out is not entered either: whoever looks inside a package imports it.
    """
    module = importlib.import_module(name)
    inner = [found.name for found in pkgutil.iter_modules(getattr(module, "__path__", ()))]
    return 1 + sum(
        import_tree(f"{name}.{each}", leave_out=leave_out)
        for each in inner
        if each != "__main__" and f"{name}.{each}" not in leave_out
    )


def check_absent(request: dict[str, Any]) -> None:
    """Raise `AssertionError` if more is installed than the requirement should bring."""
    if request["alone"] and (present := forbidden_here(request)):
        raise AssertionError(f"{request['package']} alone brings {', '.join(present)}")
    if request["brings"] is not None:
        names = sorted(found.metadata["Name"].lower() for found in distributions())
        if [name.replace("_", "-") for name in names] != sorted(request["brings"]):
            raise AssertionError(f"it brings {names}, not {request['brings']}")


def forbidden_here(request: dict[str, Any]) -> list[str]:
    """Return the modules that the package must not load and that are installed."""
    return [name for name in request["forbidden"] if importlib.util.find_spec(name)]


def check_refusals(request: dict[str, Any]) -> None:
    """Raise `AssertionError` unless each statement raises an `ImportError` that says the words."""
    for statement, words in request["refusals"]:
        try:
            exec(statement, {})
        except ImportError as error:
            if words not in str(error):
                raise AssertionError(f"{statement!r} does not say {words!r}: {error}") from error
        else:
            raise AssertionError(f"{statement!r} raises no ImportError")


def distributions() -> list[importlib.metadata.Distribution]:
    """Return what is installed in this environment."""
    return list(importlib.metadata.distributions(path=[sysconfig.get_path("purelib")]))


def installed_bytes() -> int:
    """Return the size of everything that is installed, compiled bytecode left out."""
    files = Path(sysconfig.get_path("purelib")).rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file() and path.suffix != ".pyc")


def import_seconds(package: str) -> float:
    """Return the processor time that importing the public names takes, their bytecode compiled."""
    command = [sys.executable, "-I", "-c", TIMED, package]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return float(result.stdout.splitlines()[-1])


def main() -> None:
    """Check and measure what REQUEST asks for."""
    request = json.loads(sys.argv[1])
    check_absent(request)
    imports = request["alone"] or bool(request["wanted"]) or bool(forbidden_here(request))
    modules = import_modules(request) if imports else None
    if request["works"] is not None:
        exec(request["works"], {})
    check_refusals(request)
    report = {
        "modules": modules,
        "distributions": len(distributions()),
        "bytes": installed_bytes(),
        "seconds": import_seconds(request["package"]) if request["alone"] else None,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
