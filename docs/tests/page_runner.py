"""Run the steps of one page, in order, in the working directory: `page_runner.py STEPS.json`.

Python blocks share their names, as the cells of a notebook do.
"""

from __future__ import annotations

import doctest
import gc
import json
import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

# ruff: noqa: T201 - what is printed is what a failure shows.

COMMAND_LIMIT_S = 900


def run(steps: list[dict[str, Any]]) -> None:
    """Carry out every step; raises at the first that fails."""
    # Actors get functions and classes of `__main__` by value, so that is where a page's belong.
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    kinds = {
        "python": run_python,
        "pycon": run_session,
        "command": run_command,
        "file": write_file,
        "install": install,
    }
    for step in steps:
        print(f"--- {step['where']}", flush=True)
        kinds[step["kind"]](step, module.__dict__)


def run_python(step: dict[str, Any], names: dict[str, Any]) -> None:
    """Execute a block; a traceback names the lines of the page."""
    page, line = step["where"].rsplit(":", 1)
    code = compile("\n" * (int(line) - 1) + step["text"], page, "exec", dont_inherit=True)
    exec(code, names)


def run_session(step: dict[str, Any], names: dict[str, Any]) -> None:
    """Hold a session against what it prints."""
    page, line = step["where"].rsplit(":", 1)
    test = doctest.DocTestParser().get_doctest(
        step["text"], names, step["where"], page, int(line) - 1
    )
    # `get_doctest` copies the names.
    test.globs = names
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    if runner.run(test, clear_globs=False).failed:
        raise SystemExit(f"{step['where']} does not print what it says")


def run_command(step: dict[str, Any], names: dict[str, Any]) -> None:
    """Run a command in bash and hold its output against what the page shows."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", step["text"]],
        stdout=subprocess.PIPE,
        text=True,
        timeout=COMMAND_LIMIT_S,
        check=False,
    )
    print(done.stdout)
    if done.returncode:
        raise SystemExit(f"{step['where']}: {step['text']!r} exits with {done.returncode}")
    expected = step["output"]
    matches = doctest.OutputChecker().check_output
    if expected and not matches(expected, done.stdout, doctest.ELLIPSIS):
        raise SystemExit(f"{step['where']}: {step['text']!r} does not print\n{expected}")


def write_file(step: dict[str, Any], names: dict[str, Any]) -> None:
    """Write the file that a block is the text of."""
    path = Path(step["title"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(step["text"])


def install(step: dict[str, Any], names: dict[str, Any]) -> None:
    """Let a project be found, with its entry points, by this page and what it starts."""
    folder = Path(step["text"]).resolve()
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    site = Path("site").resolve()
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata)
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    sources = folder / "src"
    added = [str(site), str(sources if sources.is_dir() else folder)]
    sys.path[:0] = added
    inherited = [entry for entry in [os.environ.get("PYTHONPATH")] if entry]
    os.environ["PYTHONPATH"] = os.pathsep.join(added + inherited)


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
    # Or the interpreter would look through all that is imported for garbage, a second with torch.
    gc.freeze()
